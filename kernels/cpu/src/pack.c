/* Rows of a GGUF file's blocks to the blocks of 16 rows that the products read (linear.c); no number changes. A block of
 * the file holds its factors, then its codes; the packed one holds the codes of 16 rows word by word, then the factors. */
#include "common.h"

typedef struct {
    const uint8_t *rows; /* [n][groups] blocks as stored */
    int64_t n, groups;
    int64_t first, step; /* packed row of row 0; every `step`-th block of 16 rows is taken */
    int kind;
    uint8_t *data;
} pack_job;

static inline void pack_group(const uint8_t *from, uint8_t *to, int64_t lane, int factors, int words, int width) {
    uint8_t *halves = to + words * width * BLOCK;
    for (int f = 0; f < factors; f++) memcpy(halves + (f * BLOCK + lane) * 2, from + 2 * f, 2);
    from += 2 * factors;
    for (int w = 0; w < words; w++) memcpy(to + (w * BLOCK + lane) * width, from + w * width, (size_t)width);
}

/* inlined, so that the sizes are constants */
static inline __attribute__((always_inline)) void pack_rows(const pack_job *j, int64_t from, int64_t to, int factors, int words, int width) {
    int64_t size = 2 * factors + words * width;
    for (int64_t start = from; start < to; start += BLOCK) {
        int64_t end = min64(start + BLOCK, to), shift = j->first + start * (j->step - 1);
        for (int64_t g = 0; g < j->groups; g++)
            for (int64_t r = start; r < end; r++) {
                int64_t row = r + shift;
                uint8_t *block = j->data + (row / BLOCK * j->groups + g) * BLOCK * size;
                pack_group(j->rows + (r * j->groups + g) * size, block, row % BLOCK, factors, words, width);
            }
    }
}

static void pack_main(int thread, int n_threads, void *arg) {
    const pack_job *j = arg;
    int64_t from, to;
    share(ceil_div(j->n, BLOCK), thread, n_threads, &from, &to);
    from *= BLOCK, to = min64(to * BLOCK, j->n);
    if (j->kind == W_Q8) pack_rows(j, from, to, 1, 16, 2);
    else if (j->kind == W_Q4_1) pack_rows(j, from, to, 2, 4, 4);
    else pack_rows(j, from, to, 1, 4, 4);
}

EXPORT void pw_pack(const uint8_t *rows, int64_t n, int64_t groups, int64_t first, int64_t step, int kind, uint8_t *data, int n_threads) {
    pack_job j = {rows, n, groups, first, step, kind, data};
    run_parallel(n_threads, pack_main, &j);
}
