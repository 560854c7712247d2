/* A library in the place of libcuda.so.1. Its functions are those that `provide` was told of; others do not exist. */
#include <string.h>

enum { CAPACITY = 128, SUCCESS = 0, NOT_FOUND = 500 };
enum { SYMBOL_FOUND = 0, SYMBOL_NOT_FOUND = 1 };

static struct { char name[64]; void *function; } functions[CAPACITY];
static int count;

int provide(const char *name, void *function) {
    if (count == CAPACITY || strlen(name) >= sizeof functions[0].name) return 0;
    strcpy(functions[count].name, name);
    functions[count++].function = function;
    return 1;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *found) {
    (void)version, (void)flags;
    *function = 0;
    for (int index = 0; index < count; ++index)
        if (!strcmp(functions[index].name, name)) *function = functions[index].function;
    if (found) *found = *function ? SYMBOL_FOUND : SYMBOL_NOT_FOUND;
    return *function ? SUCCESS : NOT_FOUND;
}

int cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, function, version, flags, 0);
}
