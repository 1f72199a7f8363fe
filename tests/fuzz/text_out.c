/* Text out of tokens with stop strings: any tokens, any stops, against a naive model. */
#include "tests/text_out_rig.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CHECK(rig_check(data, size));
    return 0;
}
