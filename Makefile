# make            build/spind                   make serve      install, fetch, build and serve
# make test       set up and run every test     make demo       a chat and a completion, live
# make bench      against llama.cpp             make lint       layout, includes, analysers
# make fuzz       FUZZ_S seconds per parser     make format     let clang-format decide
# make soak       SECONDS=600 of mixed traffic  SOAK_DEVICE=cpu with the default model; what is left over
# make quality    write docs/quality.md (TEXT=) make clean      remove what was built
# make dist       a folder that runs elsewhere  make test-cuda  what needs a GPU
# make cuda-pack  both and tests/cuda/sanitize, for a GPU machine where nothing can be installed
# make help       this                          make kbench     every kernel's share of its limit
# make bars       every number that this project is held to, on a machine with a GPU (ARGS='--only dense')
#
# Switches: HOST= PORT= MODEL= ARGS= (serve)  FUZZ_S=30 (fuzz)  SAN=address,undefined|thread
#           DEBUG=1  CUDA=1 (with build/libspind_cuda.so, all and dist)  V=1 (show commands)
#
# Downloads lie outside the tree, in SPIND_CACHE (default: ~/.cache/spind).

ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
MAKEFLAGS += -j$(shell nproc) --no-print-directory
endif
comma := ,
SHELL := /bin/bash
Q     := $(if $(V),,@)
CACHE := $(or $(SPIND_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/spind)
SETUP := configs/setup

VERSION := 0.1.0
B       := build$(if $(FUZZ),-fuzz)$(if $(SAN),-$(subst $(comma),-,$(SAN)))$(if $(DEBUG),-debug)
WARN    := -Wall -Wextra -Werror -Wshadow -Wvla -Wundef -Wformat=2 -Wpointer-arith \
           -Wwrite-strings -Wimplicit-fallthrough -Wstrict-prototypes -Wmissing-prototypes \
           -Wno-format-truncation
# Sanitizers: a third less to compile than with -O2, of the vector files two thirds, and little slower to run.
OPTIM   := $(if $(DEBUG),-O0 -DAUDIT,$(if $(SAN),-O1,-O2))
HARDEN  := -fPIE -fstack-protector-strong
CFLAGS   = -std=c11 -D_GNU_SOURCE -I. -g -fno-omit-frame-pointer -ffp-contract=off -MMD -MP \
           $(WARN) $(OPTIM) $(HARDEN) $(CHECKS)
LDFLAGS := -pie -Wl,-z,relro,-z,now,-z,noexecstack
# What a plug-in (sparse/plugin.h) may call: err, to say what is wrong with an option. The CUDA backend, a
# library of its own (kernels/cuda_api.h), takes the rest of kernels/base.h from here as well; one that a test
# puts in its place also the CPU backend.
LDFLAGS += $(addprefix -Wl$(comma)--export-dynamic-symbol=,err err_text status_name check_failed \
           mem_alloc mem_try_alloc mem_grow mem_try_grow mem_free cpu_backend_open)
LDLIBS  := -luv -lcjson -lpthread -ldl -lm

# Sanitizers bring their own allocator; everything else gets jemalloc and glibc's checked copies.
ifdef FUZZ
CC      := $(firstword $(shell command -v clang-14 clang) clang)
CHECKS  := -Wno-error -Wno-unknown-warning-option -Wno-missing-prototypes -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
LDFLAGS += -fsanitize=fuzzer,address,undefined
else ifdef SAN
# TSan knows no fences, and gcc says so. Those of engine/mailbox.c order a flag for sleeping; no data
# is handed over by them.
CHECKS  := -fsanitize=$(SAN) -fno-sanitize-recover=all $(if $(findstring thread,$(SAN)),-Wno-tsan)
LDFLAGS += -fsanitize=$(SAN)
else
CHECKS  := $(if $(DEBUG),,-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2)
LDLIBS  += -ljemalloc
endif

# Files of one instruction set are compiled with its flags; who may run them is asked at start.
ISA_avx2   := -mavx2 -mfma -mf16c
ISA_avx512 := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c -mavx2 -mprefer-vector-width=512
isa-of      = $(foreach isa,avx2 avx512,$(if $(findstring _$(isa).c,$(1)),$(ISA_$(isa))))

FOLDERS := kernels kernels/cpu kernels/mock cache sparse engine engine/model engine/text engine/tool api api/load server
# The fuzzers parse and do not compute.
FOLDERS := $(if $(FUZZ),$(filter-out kernels/cpu,$(FOLDERS)),$(FOLDERS))
SRC     := $(filter-out server/main.c,$(wildcard $(addsuffix /*.c,$(FOLDERS))))
OBJ     := $(SRC:%.c=$(B)/%.o) $(B)/api/page_files.o
ALL     := $(wildcard $(addsuffix /*.[ch],$(FOLDERS) kernels/core tests tests/unit tests/contract \
           tests/e2e tests/fuzz tests/bench tests/plugin))
tests-of = $(patsubst tests/%.c,$(B)/tests/%,$(wildcard tests/$(1)/*.c))
# Sparse-attention plug-ins as others build them: against a header alone, loaded with --plugin.
BAD     := symbol abi name taken common preset twice count score
PLUGINS := $(B)/tests/plugin/signs.so $(B)/tests/plugin/odd.so $(BAD:%=$(B)/tests/plugin/bad-%.so)
# And libraries in the place of the CUDA backend, one that serves and others at fault.
FAULT   := symbol abi size
PLUGINS += $(B)/tests/plugin/dense-cuda.so $(FAULT:%=$(B)/tests/plugin/fault-%-cuda.so)
TESTS   := $(patsubst tests/%.c,$(B)/tests/%,$(wildcard tests/*.c)) $(call tests-of,unit) $(call tests-of,contract) $(call tests-of,e2e)

.DEFAULT_GOAL := all
.PHONY: all serve test demo bench quality lint fuzz soak format clean help tests fuzzers benches \
        format-check deps headers tidy cppcheck analyze force
all: $(B)/spind $(if $(CUDA),$(B)/libspind_cuda.so)

# llhttp before 9 lets smuggled requests through. Where the system has none that is new enough, its
# sources are compiled in.
ifeq ($(LLHTTP),)
llhttp_major := $(shell printf '\#include <llhttp.h>\nLLHTTP_VERSION_MAJOR\n' | $(CC) -E -P - 2>/dev/null | tail -n 1)
ifeq ($(shell [ "$(llhttp_major)" -ge 9 ] 2>/dev/null && echo new),new)
LDLIBS  += -lllhttp
else
LLHTTP  := $(CACHE)/llhttp
endif
endif
.PHONY: llhttp
llhttp: ;@:
ifneq ($(LLHTTP),)
CFLAGS  += -isystem $(LLHTTP)/include
OBJ     += $(addprefix $(B)/llhttp/,llhttp.o api.o http.o)
$(LLHTTP)/include/llhttp.h:
	@$(SETUP)/llhttp.sh
llhttp: $(LLHTTP)/include/llhttp.h
$(patsubst %,$(LLHTTP)/src/%.c,llhttp api http): | $(LLHTTP)/include/llhttp.h ;
$(OBJ) $(B)/server/main.o: | $(LLHTTP)/include/llhttp.h
$(B)/llhttp/%.o: $(LLHTTP)/src/%.c $(B)/flags
	@mkdir -p $(@D)
	$(Q)$(CC) $(filter-out $(WARN),$(CFLAGS)) -w -c $< -o $@
endif

# Objects are made again when the compiler or its flags change.
$(B)/flags: force
	@mkdir -p $(@D)
	@echo '$(CC) $(CFLAGS)' | cmp -s - $@ || { $(SETUP)/packages.sh --check build && echo '$(CC) $(CFLAGS)' > $@; }

ifeq ($(V),)
show = @printf '%-5s %s\n' $(1) $(2)
endif
$(B)/server/main.o: CFLAGS += -DSPIND_VERSION='"$(VERSION)"'
$(B)/%.o: %.c $(B)/flags
	@mkdir -p $(@D)
	$(call show,CC,$<)
	$(Q)$(CC) $(CFLAGS) $(call isa-of,$<) -c $< -o $@
# The files of the chat page as symbols: api/page.c.
PAGE    := chat.html chat.css chat.js
$(B)/api/page_files.o: $(PAGE:%=api/page/%)
	@mkdir -p $(@D)
	$(call show,LD,$@)
	$(Q)cd api/page && $(LD) -r -b binary -z noexecstack -o $(CURDIR)/$@ $(PAGE)
$(B)/libspind.a: $(OBJ)
	$(call show,AR,$@)
	@rm -f $@
	$(Q)$(AR) rcs $@ $^
$(B)/spind: $(B)/server/main.o $(B)/libspind.a
	$(call show,LINK,$@)
	$(Q)$(CC) $(LDFLAGS) $^ $(LDLIBS) -o $@

# Tests link what they use from the archive; what a test defines itself is not pulled from there.
$(B)/tests/%: $(B)/tests/%.o $(B)/libspind.a
	@mkdir -p $(@D)
	$(call show,LINK,$@)
	$(Q)$(CC) $(LDFLAGS) $^ $(LDLIBS) -o $@
$(B)/tests/plugin/%.so: tests/plugin/%.c $(B)/flags
	@mkdir -p $(@D)
	$(call show,SO,$@)
	$(Q)$(CC) $(filter-out -fPIE,$(CFLAGS)) -fPIC -shared $< -o $@
$(B)/tests/plugin/bad-%.so: tests/plugin/bad.c $(B)/flags
	@mkdir -p $(@D)
	$(call show,SO,$@)
	$(Q)$(CC) $(filter-out -fPIE,$(CFLAGS)) -fPIC -shared -DBAD_$(shell echo $* | tr a-z A-Z) $< -o $@
$(B)/tests/plugin/fault-%-cuda.so: tests/plugin/dense-cuda.c $(B)/flags
	@mkdir -p $(@D)
	$(call show,SO,$@)
	$(Q)$(CC) $(filter-out -fPIE,$(CFLAGS)) -fPIC -shared -DFAULT_$(shell echo $* | tr a-z A-Z) $< -o $@
$(B)/tests/unit/sparse $(B)/tests/unit/cuda_load $(B)/tests/contract/plugins: | $(PLUGINS)
.SECONDARY:

tests: $(TESTS) $(B)/tests/text_pipe $(PLUGINS)
fuzzers: $(call tests-of,fuzz)
benches: $(call tests-of,bench)

# The CUDA backend: nothing above may link it. Machine code for each of CUDA_ARCHS. dtype.c comes along,
# since programs that do not decode weights have none to lend.
NVCC       = $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc) nvcc)
CUDA_HOME  = $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
CUDA_ARCHS ?= 80 89 90a
CUDA_SRC  := $(wildcard kernels/cuda/*.cu)
CUDA_OBJ  := $(CUDA_SRC:%.cu=$(B)/%.o) $(B)/kernels/cuda/dtype.o
CUDA_ALL  := $(wildcard kernels/cuda/*.cu kernels/cuda/*.h tests/cuda/*.c tests/cuda/*.h tests/cuda/*.cu tests/cuda/preload/*.cu tests/cuda/dry/*.c tests/cuda/dry/*.cu)
CUDA_OPTIM ?= -O3
NVCCFLAGS  = -std=c++17 $(CUDA_OPTIM) -lineinfo $(foreach a,$(CUDA_ARCHS),-gencode=arch=compute_$(a),code=sm_$(a)) \
             -Werror all-warnings -Xcompiler -fPIC,-Wall,-Wextra,-Werror,-fvisibility=hidden \
             -DCUDA_ARCHS='"$(CUDA_ARCHS)"' -I. -MMD -MP
CUDA_TESTS := $(patsubst tests/%,$(B)/tests/%,$(basename $(filter-out tests/cuda/bench_%,$(wildcard tests/cuda/*.c tests/cuda/*.cu))))
$(B)/nvcc-flags: force
	@mkdir -p $(@D)
	@command -v $(NVCC) > /dev/null || { echo 'spind: CUDA=1 needs nvcc of CUDA 13: put it on PATH, or name it: make CUDA=1 NVCC=...' >&2; exit 1; }
	@echo '$(NVCC) $(NVCCFLAGS)' | cmp -s - $@ || echo '$(NVCC) $(NVCCFLAGS)' > $@
$(B)/%.o: %.cu $(B)/nvcc-flags
	@mkdir -p $(@D)
	$(call show,NVCC,$<)
	$(Q)$(NVCC) $(NVCCFLAGS) -c $< -o $@
$(B)/kernels/cuda/dtype.o: kernels/dtype.c $(B)/flags
	@mkdir -p $(@D)
	$(call show,CC,$<)
	$(Q)$(CC) $(filter-out -fPIE,$(CFLAGS)) -fPIC -fvisibility=hidden -c $< -o $@
$(B)/libspind_cuda.so: $(CUDA_OBJ)
	$(call show,SO,$@)
	$(Q)$(NVCC) -shared -cudart static $^ -lcublasLt -o $@ \
	    -Xlinker --exclude-libs=ALL,--as-needed,-z,relro,-z,now,-rpath,'$$ORIGIN:/usr/local/cuda/lib64:$(CUDA_HOME)/lib64'
# Measures kernels inside the library, so it links them.
$(B)/tests/cuda/bench_%: tests/cuda/bench_%.cu $(CUDA_OBJ) $(B)/libspind.a
	@mkdir -p $(@D)
	$(call show,NVCC,$@)
	$(Q)$(NVCC) $(NVCCFLAGS) -cudart static $< $(CUDA_OBJ) $(B)/libspind.a -lcublasLt -lpthread -lm -o $@
# The backend's host side without a GPU (tests/cuda/dry/runtime.c).
DRY := $(B)/tests/cuda/dry/libspind_cuda.so
$(B)/tests/cuda/dry/runtime.o: tests/cuda/dry/runtime.c
	@mkdir -p $(@D)
	$(call show,CC,$<)
	$(Q)$(CC) -std=c11 -O1 -Wall -Wextra -Werror -fPIC -isystem $(CUDA_HOME)/include -c $< -o $@
$(DRY): $(B)/tests/cuda/dry/runtime.o $(B)/tests/cuda/dry/cudnn.o $(filter-out %/cudnn.o,$(CUDA_OBJ))
	$(call show,SO,$@)
	$(Q)$(CXX) -shared $^ -Wl,-Bsymbolic -lpthread -ldl -lm -o $@
# For CUDA_INJECTION64_PATH: when the kernels of steps begin and end (tests/cuda/trace/inject.c).
$(B)/tests/cuda/libtrace.so: tests/cuda/trace/inject.c
	@mkdir -p $(@D)
	$(call show,SO,$@)
	$(Q)$(CC) -std=c11 -D_GNU_SOURCE -O1 -Wall -Wextra -Werror -fPIC -shared -isystem $(CUDA_HOME)/include $< \
	    -L$(CUDA_HOME)/lib64 -L$(CUDA_HOME)/lib -lcupti -lpthread -o $@
# For tests/cuda/sanitize: in the place of cuBLASLt.
$(B)/tests/cuda/libproducts.so: tests/cuda/preload/products.cu $(B)/nvcc-flags
	@mkdir -p $(@D)
	$(call show,NVCC,$@)
	$(Q)$(NVCC) $(NVCCFLAGS) -shared -cudart static $< -o $@
# Looks inside one file of it, which it includes.
$(B)/tests/cuda/%: tests/cuda/%.cu $(B)/libspind.a $(B)/nvcc-flags
	@mkdir -p $(@D)
	$(call show,NVCC,$@)
	$(Q)$(NVCC) $(NVCCFLAGS) -cudart static $< $(B)/libspind.a -lpthread -lm -o $@
.PHONY: cuda-tests cuda-benches test-cuda kbench bars dist cuda-pack
CUDA_BENCHES := $(patsubst tests/%,$(B)/tests/%,$(basename $(wildcard tests/cuda/bench_*.cu tests/cuda/bench_*.c)))
cuda-benches: $(B)/libspind_cuda.so $(CUDA_BENCHES)
# Each prints lines as tests/cuda/kbench.h has them; this makes one table of all.
kbench: cuda-benches # on a machine with a GPU; loading a file is no kernel
	@SPIND_CUDA_LIBRARY=$(CURDIR)/$(B)/libspind_cuda.so tests/cuda/kbench --log $(B)/kbench.log --markdown $(B)/kbench.md $(filter-out %/bench_load,$(CUDA_BENCHES))
bars: $(B)/spind cuda-benches # on a machine with a GPU; tests/bench/bars --help
	@python3 tests/bench/bars --spind $(B)/spind --out $(B)/bars $(ARGS)
cuda-tests: $(B)/libspind_cuda.so $(DRY) $(B)/tests/cuda/dry/scratch $(CUDA_TESTS) $(B)/tests/unit/cuda_load $(B)/tests/cuda/libproducts.so
test-cuda: cuda-tests $(B)/spind # on a machine with a GPU
	+@$(CALL) tests/cuda/run $(CUDA_TESTS) $(B)/tests/unit/cuda_load

# Everything that a machine without our packages needs to run the daemon, in one folder.
dist: $(B)/spind $(if $(CUDA),$(B)/libspind_cuda.so)
	@rm -rf $(B)/dist && mkdir -p $(B)/dist
	$(Q)$(CC) $(LDFLAGS) -Wl,-rpath,'$$ORIGIN' $(B)/server/main.o $(B)/libspind.a $(LDLIBS) -o $(B)/dist/spind
	@ldd $(B)/spind | awk '/libuv|libcjson|libjemalloc|libllhttp/ {print $$3}' | xargs -r -I{} cp -L {} $(B)/dist
	@cp -r configs $(if $(CUDA),$(B)/libspind_cuda.so) $(B)/dist
	@git describe --always --dirty --abbrev=12 > $(B)/dist/commit 2> /dev/null || echo unknown > $(B)/dist/commit
	@echo '$(B)/dist: $(notdir $(B)/spind), its libraries$(if $(CUDA),$(comma) the CUDA backend) and configs'

# The same with the programs of test-cuda and kbench: for a machine with a GPU, where nothing can be installed.
CUDA_PLUGINS = $(filter %-cuda.so,$(PLUGINS))
cuda-pack: dist cuda-tests cuda-benches $(CUDA_PLUGINS)
	@tests/cuda/pack $(B)/dist $(B)/cuda-pack $(CUDA_TESTS) $(CUDA_BENCHES) $(B)/tests/unit/cuda_load $(CUDA_PLUGINS) $(B)/tests/cuda/libproducts.so

# What needs more than a compiler is a script, which sets up first and builds by calling back.
CALL := SPIND_CACHE='$(CACHE)' MAKE='$(MAKE)' SPIND='$(B)/spind' MODEL='$(MODEL)'
serve:
	+@$(CALL) HOST='$(HOST)' PORT='$(PORT)' $(SETUP)/serve.sh $(ARGS)
demo:
	+@$(CALL) $(SETUP)/demo.sh
test:
	+@$(CALL) tests/run
bench:
	+@$(CALL) TEXT='$(TEXT)' tests/bench/run
quality: $(B)/spind # pieces that this very program measured before are kept in $(B)/quality
	@$(if $(MODEL),,$(SETUP)/model.sh)
	$(B)/spind eval quality --out docs --cache $(B)/quality $(if $(MODEL),--model '$(MODEL)') \
	    $(if $(TEXT),--text '$(TEXT)') --json $(B)/quality.json
soak: $(B)/spind # SOAK_DEVICE=cpu: with the default model
	@SPIND=$(B)/spind SPIND_BUILD=$(B) python3 tests/e2e/soak.py $(or $(SECONDS),60)
fuzz:
	+@$(CALL) FUZZ_S='$(or $(FUZZ_S),30)' tests/fuzz/run

lint: format-check deps headers tidy cppcheck
CLANG_FORMAT := $(firstword $(shell command -v clang-format-14 clang-format) clang-format)
CLANG_TIDY   := $(firstword $(shell command -v clang-tidy-14 clang-tidy) clang-tidy)
LINT_CFLAGS   = $(filter-out -MMD -MP -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2,$(CFLAGS)) -DSPIND_VERSION='""'
format:
	$(CLANG_FORMAT) -i $(ALL) $(CUDA_ALL)
format-check:
	@$(CLANG_FORMAT) --dry-run -Werror $(ALL) $(CUDA_ALL) && echo 'layout: $(words $(ALL) $(CUDA_ALL)) files as clang-format wants them'
deps: # who may include whom is in tests/deps.awk
	@awk -f tests/deps.awk $(ALL) $(CUDA_ALL) && echo 'includes: no folder reaches up'
headers: # each stands alone (a _vec.h is a body, for each instruction set); CUDA's in C++ too
	@for h in $(filter-out %_vec.h,$(filter %.h,$(ALL))); do \
	    $(CC) $(LINT_CFLAGS) -Wno-unused -fsyntax-only -x c $$h || exit 1; done
	@for h in $(wildcard kernels/base.h kernels/backend.h kernels/cuda_api.h kernels/dtype.h kernels/core/*.h); do \
	    $(CXX) -std=c++17 -I. -fsyntax-only -x c++ $$h || exit 1; done
	@echo 'headers: each compiles alone'
tidy: $(addprefix tidy/,$(SRC) $(wildcard server/main.c))
	@echo 'clang-tidy: nothing to say'
tidy/%:
	@$(CLANG_TIDY) --quiet $* -- $(LINT_CFLAGS) -Wno-unknown-warning-option $(call isa-of,$*) 2> /dev/null
cppcheck:
	@cppcheck --quiet -j $$(nproc) --error-exitcode=1 --enable=warning,performance,portability --std=c11 \
	    --inline-suppr --suppress=missingIncludeSystem --suppress=invalidPointerCast \
	    '-D_Alignas(x)=' '-D_Thread_local=' \
	    '--suppress=invalidFunctionArg:engine/tool/*' '--suppress=unknownMacro:engine/tool/*' -DLLHTTP_VERSION_MAJOR=9 -D_GNU_SOURCE -I. $(SRC) $(wildcard server/main.c) \
	    && echo 'cppcheck: nothing to say'
analyze: # gcc's own; slow, and not part of lint: gcc 12 reports paths that cannot happen
	@for f in $(SRC); do $(CC) $(CFLAGS) -fanalyzer -c $$f -o $(B)/analyze.o || exit 1; done

clean:
	rm -rf build build-*
help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

-include $(shell find $(B) -name '*.d' 2> /dev/null)
