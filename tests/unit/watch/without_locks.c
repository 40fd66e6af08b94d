/* Preloaded: no file below the folder WITHOUT_LOCKS can be locked, as on a network file system that has no locks. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is_refused(int file, int command) {
  char link[64], path[4096];
  const char *folder = getenv("WITHOUT_LOCKS");
  if (folder == NULL || (command != F_SETLK && command != F_SETLKW && command != F_GETLK)) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, sizeof path);
  return length >= (ssize_t)strlen(folder) && strncmp(path, folder, strlen(folder)) == 0;
}

#define REFUSES(name)                                                 \
  int name(int file, int command, ...) {                              \
    va_list rest;                                                     \
    va_start(rest, command);                                          \
    void *argument = va_arg(rest, void *);                            \
    va_end(rest);                                                     \
    if (is_refused(file, command)) {                                  \
      errno = ENOLCK;                                                 \
      return -1;                                                      \
    }                                                                 \
    int (*real)(int, int, ...) = (int (*)(int, int, ...))dlsym(RTLD_NEXT, #name); \
    return real(file, command, argument);                             \
  }

REFUSES(fcntl)
REFUSES(fcntl64)
