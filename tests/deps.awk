# Who may include whom (docs/tour.md). A line that breaks it is printed, and the run fails.
BEGIN {
    may["kernels"] = "kernels"
    may["cache"] = "kernels cache"
    may["sparse"] = "kernels sparse"
    may["engine"] = "kernels cache sparse engine"
    # The API sees the engine's mailbox, its types and the text code; never the model or the cache.
    may["api"] = "kernels/base.h kernels/core kernels/log.h kernels/backend.h kernels/dtype.h engine/mailbox.h engine/message.h engine/engine.h engine/catalog.h engine/text api"
    # The server sees the API; of the engine only what opens it.
    may["server"] = "kernels/base.h kernels/log.h kernels/backend.h api engine/engine.h engine/mailbox.h engine/message.h engine/catalog.h engine/tool server"
}
/^#include "/ {
    split(FILENAME, from, "/")
    if (!(from[1] in may)) next
    # The load client measures and reports as the engine's tools do.
    if (FILENAME ~ /^api\/load\// && $2 ~ /^"engine\/tool\/(args|measure|plot|sheet)\.h"$/) next
    split($2, q, "\"")
    n = split(may[from[1]], ok, " "); good = 0
    for (i = 1; i <= n; i++) good = good || q[2] == ok[i] || index(q[2], ok[i] "/") == 1
    if (!good) { print FILENAME ":" FNR ": " from[1] "/ may not include " q[2]; bad = 1 }
}
END { exit bad }
