# Bootstrap rules; see `make help`.
B       := build$(if $(CUDA),-cuda)$(if $(SAN),-$(SAN))$(if $(DEBUG),-debug)
WARN    := -Wall -Wextra -Werror -Wshadow -Wvla -Wundef -Wformat=2 -Wpointer-arith \
           -Wwrite-strings -Wimplicit-fallthrough -Wstrict-prototypes -Wmissing-prototypes
CFLAGS  := -std=c11 -D_GNU_SOURCE -I. -g -fno-omit-frame-pointer -ffp-contract=off -MMD -MP $(WARN) $(if $(DEBUG),-O0 -DAUDIT,-O2)
ifdef SAN
CFLAGS  += -fsanitize=$(SAN) -fno-sanitize-recover=all
LDFLAGS += -fsanitize=$(SAN)
endif
$(B)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(CFLAGS_$(subst /,_,$*)) -c $< -o $@
-include $(shell find $(B) -name '*.d' 2>/dev/null)
