/* LD_PRELOAD: every fdatasync takes 50 to 300 ms longer, as on a disk that others are using. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

int fdatasync(int fd)
{
    static int (*real)(int);
    if (!real)
        real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    usleep(50000 + rand() % 250000);
    return real(fd);
}
