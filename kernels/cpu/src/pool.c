/* A small pool: workers spin for some tens of microseconds, then sleep, and nothing spins for ever. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "common.h"

#define SPIN_CYCLES 150000ull /* between 40 and 80 microseconds */
#define HUGE_PAGE (2u << 20)
#define DENORMALS_ARE_ZERO 0x8040u /* a denormal costs a hundred cycles, and weights of far keys are denormal */

typedef struct {
    _Alignas(64) atomic_uint value;
    atomic_int sleepers;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
} gate;

static void gate_init(gate *g) {
    atomic_init(&g->value, 0);
    atomic_init(&g->sleepers, 0);
    pthread_mutex_init(&g->mutex, NULL);
    pthread_cond_init(&g->changed, NULL);
}

static void gate_open(gate *g) {
    atomic_fetch_add(&g->value, 1);
    if (atomic_load(&g->sleepers) == 0) return;
    pthread_mutex_lock(&g->mutex);
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->mutex);
}

static void gate_wait(gate *g, unsigned seen) {
    unsigned long long until = __rdtsc() + SPIN_CYCLES;
    while (atomic_load_explicit(&g->value, memory_order_acquire) == seen) {
        if (__rdtsc() < until) {
            _mm_pause();
            continue;
        }
        pthread_mutex_lock(&g->mutex);
        atomic_fetch_add(&g->sleepers, 1);
        while (atomic_load(&g->value) == seen) pthread_cond_wait(&g->changed, &g->mutex);
        atomic_fetch_sub(&g->sleepers, 1);
        pthread_mutex_unlock(&g->mutex);
    }
}

static pthread_mutex_t job_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t prepared = PTHREAD_ONCE_INIT;
static gate crossing, wake[MAX_THREADS]; /* wake[i] starts worker i; 0 is the caller */
static atomic_int arrived;
static int n_workers = 1, job_threads = 1;
static job_fn job;
static void *job_arg;
static __thread int my_id;

void barrier(void) {
    if (job_threads == 1) return;
    unsigned seen = atomic_load(&crossing.value);
    if (atomic_fetch_add(&arrived, 1) + 1 == job_threads) {
        atomic_store(&arrived, 0);
        gate_open(&crossing);
    } else {
        gate_wait(&crossing, seen);
    }
}

static void *work(void *id) {
    my_id = (int)(intptr_t)id;
    _mm_setcsr(_mm_getcsr() | DENORMALS_ARE_ZERO);
    for (unsigned seen = 0;; seen++) {
        gate_wait(&wake[my_id], seen);
        job(my_id, job_threads, job_arg);
        barrier();
    }
    return NULL;
}

static void before_fork(void) { pthread_mutex_lock(&job_lock); }
static void after_fork_parent(void) { pthread_mutex_unlock(&job_lock); }
static void after_fork_child(void) { /* the workers did not come along */
    pthread_mutex_init(&job_lock, NULL);
    gate_init(&crossing);
    atomic_init(&arrived, 0);
    n_workers = 1;
    my_id = 0;
}
static void prepare(void) {
    gate_init(&crossing);
    pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

static void hire(int n) {
    while (n_workers < n) {
        pthread_t thread;
        gate_init(&wake[n_workers]);
        if (pthread_create(&thread, NULL, work, (void *)(intptr_t)n_workers) != 0) return;
        pthread_detach(thread);
        n_workers++;
    }
}

void run_parallel(int n_threads, job_fn fn, void *arg) {
    pthread_once(&prepared, prepare);
    pthread_mutex_lock(&job_lock);
    hire(n_threads < MAX_THREADS ? n_threads : MAX_THREADS);
    job_threads = n_threads < 1 ? 1 : (int)min64(n_threads, n_workers);
    job = fn;
    job_arg = arg;
    for (int i = 1; i < job_threads; i++) gate_open(&wake[i]);
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | DENORMALS_ARE_ZERO);
    job(0, job_threads, job_arg);
    _mm_setcsr(before);
    barrier();
    pthread_mutex_unlock(&job_lock);
}

/* asks for large pages where the range holds any: half as many again bytes a second come from memory then */
EXPORT void pw_huge_pages(void *memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
    uintptr_t from = (uintptr_t)round_up((int64_t)(uintptr_t)memory, HUGE_PAGE), to = ((uintptr_t)memory + bytes) / HUGE_PAGE * HUGE_PAGE;
    if (from < to) madvise((void *)from, to - from, MADV_HUGEPAGE);
#endif
}

typedef struct {
    void *memory;
    size_t bytes;
} buffer;

static buffer shared_buffers[SH_COUNT + 2 * MAX_PLANS], thread_buffers[MAX_THREADS][TH_COUNT];

static void *grow(buffer *b, size_t bytes) {
    if (bytes <= b->bytes) return b->memory;
    free(b->memory);
    size_t align = bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
    b->bytes = (size_t)round_up((int64_t)(bytes + bytes / 4), (int64_t)align);
    b->memory = aligned_alloc(align, b->bytes);
    if (b->memory == NULL) abort();
    pw_huge_pages(b->memory, b->bytes);
    return b->memory;
}

void *scratch_shared(int slot, size_t bytes) { return grow(&shared_buffers[slot], bytes); }
void *scratch_thread(int slot, size_t bytes) { return grow(&thread_buffers[my_id][slot], bytes); }
