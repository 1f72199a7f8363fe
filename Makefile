# Bootstrap rules; the full set comes with `make help`.
B       := build$(if $(CUDA),-cuda)$(if $(SAN),-$(subst $(comma),-,$(SAN)))$(if $(DEBUG),-debug)
comma   := ,
LLHTTP  ?= /tmp/dl/llhttp
WARN    := -Wall -Wextra -Werror -Wshadow -Wvla -Wundef -Wformat=2 -Wpointer-arith \
           -Wwrite-strings -Wimplicit-fallthrough -Wstrict-prototypes -Wmissing-prototypes
CFLAGS  := -std=c11 -D_GNU_SOURCE -I. -g -fno-omit-frame-pointer -ffp-contract=off -MMD -MP $(WARN) $(if $(DEBUG),-O0 -DAUDIT,-O2)
ifdef SAN
CFLAGS  += -fsanitize=$(SAN) -fno-sanitize-recover=all
LDFLAGS += -fsanitize=$(SAN)
endif
LDLIBS  := -luv -lcjson $(if $(SAN),,-ljemalloc) -lpthread -ldl -lm

# Files of one instruction set are compiled with its flags; who may run them is asked at start.
ISA_avx2   := -mavx2 -mfma -mf16c
ISA_avx512 := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512bf16 -mfma -mf16c -mavx2 -mprefer-vector-width=512

FOLDERS := kernels kernels/cpu kernels/mock cache engine engine/model engine/text api server
SRC     := $(filter-out server/main.c,$(wildcard $(addsuffix /*.c,$(FOLDERS))))
OBJ     := $(SRC:%.c=$(B)/%.o)
tests-of = $(patsubst tests/%.c,$(B)/tests/%,$(wildcard tests/$(1)/*.c))

$(B)/%_avx2.o: %_avx2.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(ISA_avx2) -c $< -o $@
$(B)/%_avx512.o: %_avx512.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(ISA_avx512) -c $< -o $@
$(B)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c $< -o $@
# A test may name what it links (NEEDS_unit_kv := cache/kv.o ...); by default everything but main.
TEXT    := kernels/base.o $(addprefix engine/text/,bpe.o normalize.o pretokenize.o special.o tokenizer.o unicode_table.o utf8.o vocab.o)
NEEDS_tokenize_lines  := $(TEXT)
NEEDS_unit_tokenizer  := $(TEXT)
NEEDS_unit_pretokenize := $(TEXT)
NEEDS_unit_utf8       := $(TEXT)
NEEDS_unit_chat       := $(TEXT)
NEEDS_bench_tokenizer := $(TEXT)
NEEDS_fuzz_tokenizer  := $(TEXT)
NEEDS_unit_philox := kernels/base.o
NEEDS_unit_mock := kernels/base.o kernels/mock/mock.o
NEEDS_contract_sample := kernels/base.o kernels/cpu/pool.o kernels/cpu/sample.o kernels/cpu/sample_avx512.o
ATTEND_O := $(addprefix kernels/cpu/,pool.o attend.o attend_scalar.o attend_avx2.o attend_avx512.o)
NEEDS_contract_attend := kernels/base.o $(ATTEND_O)
NEEDS_bench_attend := kernels/base.o $(ATTEND_O)
.SECONDEXPANSION:
$(B)/tests/%: $(B)/tests/%.o $$(if $$(NEEDS_$$(subst /,_,$$*)),$$(addprefix $(B)/,$$(NEEDS_$$(subst /,_,$$*))),$(OBJ))
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $^ $(LDLIBS) -o $@
.SECONDARY:
-include $(shell find $(B) -name '*.d' 2>/dev/null)
