/* What every file shares: the thread pool, tiles of tokens, scratch memory, and the structures that Python fills. */
#ifndef PW_COMMON_H
#define PW_COMMON_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "simd.h"

#define EXPORT __attribute__((visibility("default")))
#define MAX_THREADS 256
#define BLOCK 16 /* rows of a packed weight block, tokens of a key group */

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/* ---- threads: one job at a time, callers queue ---- */
typedef void (*job_fn)(int thread, int n_threads, void *arg);
void run_parallel(int n_threads, job_fn fn, void *arg);
void barrier(void);
/* the part of [0, n) that thread t of k owns */
static inline void share(int64_t n, int t, int k, int64_t *from, int64_t *to) {
    *from = n * t / k;
    *to = n * (t + 1) / k;
}

/* ---- scratch: grows, is never returned; the shared one belongs to the running job ---- */
void *scratch_shared(int slot, size_t bytes);
void *scratch_thread(int slot, size_t bytes);
enum { SH_ACT, SH_PLAN, SH_PARTIAL, SH_X, SH_QKV, SH_ATTN, SH_FFN, SH_OUT, SH_TOKENS, SH_COUNT };
enum { TH_ACT, TH_PAD, TH_REST, TH_ROW, TH_ATTN, TH_COUNT };
#define MAX_PLANS 16 /* of one step, each with two slots after SH_COUNT */

/* ---- tiles: n rows in equal parts of at most MT, padded to a size that has a kernel ---- */
#ifdef PW_AVX512
#define MT_MAX 12
#else
#define MT_MAX 6
#endif

static inline int padded_mt(int n) {
    if (n == 7) return 8;
    if (n == 9) return 10;
    if (n == 11) return 12;
    return n;
}

typedef struct {
    int n_tiles, base, extra; /* the first `extra` tiles have base + 1 rows */
} tiling;

static inline tiling tile_rows(int64_t n) {
    tiling t;
    t.n_tiles = (int)ceil_div(n, MT_MAX);
    t.base = t.n_tiles ? (int)(n / t.n_tiles) : 0;
    t.extra = t.n_tiles ? (int)(n % t.n_tiles) : 0;
    return t;
}
static inline int64_t tile_start(const tiling *t, int64_t i) { return i * t->base + min64(i, t->extra); }
static inline int tile_count(const tiling *t, int64_t i) { return t->base + (i < t->extra); }
/* rows before tile i when every tile is padded */
static inline int64_t tile_slot(const tiling *t, int64_t i) {
    int64_t wide = min64(i, t->extra);
    return wide * padded_mt(t->base + 1) + (i - wide) * padded_mt(t->base);
}

#define MT_CASES_SMALL(CALL) \
    case 1: CALL(1); break; \
    case 2: CALL(2); break; \
    case 3: CALL(3); break; \
    case 4: CALL(4); break; \
    case 5: CALL(5); break; \
    case 6: CALL(6); break;
#ifdef PW_AVX512
#define MT_SWITCH(mt, CALL) \
    switch (mt) { MT_CASES_SMALL(CALL) \
    case 8: CALL(8); break; \
    case 10: CALL(10); break; \
    case 12: CALL(12); break; }
#else
#define MT_SWITCH(mt, CALL) switch (mt) { MT_CASES_SMALL(CALL) }
#endif

#define UNROLL _Pragma("GCC unroll 16")

/* ---- weights ---- */
enum { W_F32 = 0, W_INT8 = 1, W_Q8 = 2, W_Q4_1 = 3, W_Q4_0 = 4 };

typedef struct {
    int32_t kind;
    int32_t n, k;   /* rows (outputs) and columns (inputs), before padding */
    int32_t planes; /* times that inputs are rounded, each time what the last rounding left */
    const uint8_t *data;
    const float *scale; /* [n padded to 16], W_INT8 only */
    const float *bias;  /* [n] or NULL */
} pw_linear;

/* ---- activations in the tiles a weight kind wants ---- */
enum { A_F32 = 0, A_INT16 = 1, A_INT8 = 2 };

typedef struct {
    int kind, planes;
    int64_t k;           /* padded to 32 */
    int64_t plane_bytes; /* from a plane to the next, in both arrays */
    tiling tiles;
    void *codes;
    float *factors; /* A_INT16: a scale a row; A_INT8: of each group of 32 a scale, scale * -MAGIC, scale * sum of codes */
} activations;

size_t act_bytes(const pw_linear *w, int64_t rows);
void act_init(activations *a, const pw_linear *w, int64_t rows, void *memory);
/* stores row `r` of `n` floats into its tile */
void act_put(activations *a, int64_t r, const float *row, int64_t n);

enum { OUT_STORE = 0, OUT_ADD = 1, OUT_SILU = 2, OUT_GELU = 3 };
/* y for the pairs of row blocks [from, to); OUT_SILU and OUT_GELU combine a pair's gate and up block */
void gemm(const activations *a, const pw_linear *w, int mode, float *y, int64_t ldy, int64_t from, int64_t to);
static inline int64_t block_pairs(const pw_linear *w) { return ceil_div(ceil_div(w->n, BLOCK), 2); }
void gather_row(const pw_linear *w, int64_t row, float *out);

/* ---- keys and values ---- */
enum { KV_F32 = 0, KV_BF16 = 1, KV_INT8 = 2 };

typedef struct {
    int32_t format, page_size, n_heads, dk, dv, has_v;
    void *k, *v;
    uint16_t *k_scale, *v_scale;
    /* elements between pages, tokens and heads; KV_INT8 uses the page strides only */
    int64_t k_page, k_token, k_head, v_page, v_token, v_head, k_scale_page, v_scale_page;
} pw_kv;

static inline int64_t int8_width(int64_t d) { return round_up(d, BLOCK); }
void kv_put(const pw_kv *kv, int64_t page, int64_t offset, int head, const float *k, const float *v);

/* ---- attention ---- */
typedef struct {
    int32_t n_seq, n_q_heads, window; /* window 0: none */
    float scale, softcap;             /* softcap 0: none */
    const int32_t *page_table;        /* [n_seq, table_stride] */
    int64_t table_stride;
    const int32_t *query_start; /* [n_seq + 1] */
    const int32_t *kv_len;      /* [n_seq] */
    const int32_t *kv_start;    /* [n_seq], position of the first slot */
    const float *sinks;         /* [n_q_heads] or NULL */
} pw_attn;

typedef struct attn_plan attn_plan;
/* the plan depends on lengths only: one serves every layer with the same heads and window; it lives in two slots */
attn_plan *plan_attention(const pw_attn *a, int n_kv_heads, int dv, int n_threads, int slot);
/* run by every thread of a job; the caller puts a barrier after it */
void attend(attn_plan *plan, const pw_attn *a, const pw_kv *kv, const float *q, int64_t ldq, float *out, int64_t ldo);
/* made ready again by one thread, between two barriers or before the job */
void plan_reset(attn_plan *plan);

/* ---- rows ---- */
void norm_row(const float *x, const float *w, float eps, int64_t n, float *y);
void gate_row(const float *gate, const float *up, int64_t n, int gelu, float *y);
void rope_row(float *x, const float *cos, const float *sin, int64_t rot);

#endif
