/* A wall clock that jumps, for one process (LD_PRELOAD): CLOCK_REALTIME is off by the seconds that
 * the file $CLOCK_OFFSET holds as an int64, at any time. Waits until a time of that clock are what
 * the kernel would make of them: they end when the clock, jumps included, has come to it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset;

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
    void *shared = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (file < 0 || shared == MAP_FAILED) _exit(127);
    offset = shared;
}

int clock_gettime(clockid_t clock, struct timespec *t) {
    int failed = (int)syscall(SYS_clock_gettime, clock, t);
    if (!failed && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        t->tv_sec += *offset;
    return failed;
}

int timespec_get(struct timespec *t, int base) {
    return base == TIME_UTC && clock_gettime(CLOCK_REALTIME, t) == 0 ? base : 0;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}

/* Whether the clock has come to `until`; if not, how long to wait before looking again whether it
 * has jumped, as the kernel would know without looking. To the caller that is a spurious wake-up:
 * whoever signalled in between is not missed. */
static int has_come(const struct timespec *until, struct timespec *look, int *is_last) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    int64_t left = (until->tv_sec - now.tv_sec) * 1000000000LL + until->tv_nsec - now.tv_nsec;
    int64_t slice = left > 20000000 ? 20000000 : left;
    if (left <= 0) return 1;
    *is_last = slice == left;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, look);
    look->tv_nsec += slice;
    if (look->tv_nsec >= 1000000000) {
        look->tv_nsec -= 1000000000;
        look->tv_sec += 1;
    }
    return 0;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec look;
    int is_last;
    if (!wait) *(void **)&wait = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    if (has_come(until, &look, &is_last)) return ETIMEDOUT;
    int result = wait(cond, mutex, &look);
    return result == ETIMEDOUT && !is_last ? 0 : result;
}

/* librdkafka's. */
int cnd_timedwait(cnd_t *restrict cond, mtx_t *restrict mutex,
                  const struct timespec *restrict until) {
    static int (*wait)(cnd_t *, mtx_t *, const struct timespec *);
    struct timespec look;
    int is_last;
    if (!wait) *(void **)&wait = dlsym(RTLD_NEXT, "cnd_timedwait");
    if (has_come(until, &look, &is_last)) return thrd_timedout;
    int result = wait(cond, mutex, &look);
    return result == thrd_timedout && !is_last ? thrd_success : result;
}
