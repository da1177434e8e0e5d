/* Paged attention over ragged batches: prefill and decode are one path.
 *
 * A tile is some neighbouring queries of one sequence times the heads that share one key head; it reads keys and
 * values in chunks of CHUNK positions. Each chunk gives (max, sum, output) of its own, and these are folded from
 * left to right. A chunk's result depends on the row and the chunk alone, so the same bits come out however a
 * prompt is cut, whoever shares the batch, and however chunks are spread over threads.
 */
#include <stdatomic.h>

#include "products.h"
#include "rows.h"

#define CHUNK 64
#define GROUPS (CHUNK / BLOCK)
#define TILE_ROWS 96
#define ITEMS_PER_THREAD 6
#define Q_LIMIT 8191.0f  /* 127 * 8191 * 2048 fits 32 bits */
#define P_LIMIT 32767.0f /* 127 * 32767 * CHUNK fits 32 bits */

typedef struct {
    int32_t seq, head, first, n_tokens;  /* queries [first, first + n_tokens) of the sequence */
    int32_t chunk_from, chunk_to;        /* absolute chunks */
    int32_t n_items;
    int64_t partial; /* offset into the partial results, when n_items > 1 */
} tile_info;

typedef struct {
    int32_t tile, chunk_from, chunk_to;
} item_info;

struct attn_plan {
    tile_info *tiles;
    item_info *items;
    atomic_int *open; /* items of a tile still to finish */
    int n_tiles, n_items, group, ov;
    int64_t partial_floats;
    float *partial;
    _Alignas(64) atomic_int next;
};

/* of one chunk of a tile: max and sum of each row, then the outputs */
static int64_t partial_floats(int n_rows, int ov) { return 2 * round_up(n_rows, BLOCK) + (int64_t)n_rows * ov; }

static int64_t first_key(const pw_attn *a, int seq, int64_t pos) {
    int64_t lo = a->kv_start[seq];
    return a->window > 0 ? max64(lo, pos - a->window + 1) : lo;
}

static int64_t first_position(const pw_attn *a, int seq) {
    return a->kv_len[seq] - (a->query_start[seq + 1] - a->query_start[seq]);
}

void plan_reset(attn_plan *p) {
    atomic_store(&p->next, 0);
    for (int i = 0; i < p->n_tiles; i++) atomic_store(&p->open[i], p->tiles[i].n_items);
}

attn_plan *plan_attention(const pw_attn *a, int n_kv_heads, int dv, int n_threads, int slot) {
    int group = a->n_q_heads / n_kv_heads;
    int step = (int)max64(1, TILE_ROWS / group);
    int64_t n_tiles = 0, units = 0;
    for (int s = 0; s < a->n_seq; s++) {
        int64_t n = a->query_start[s + 1] - a->query_start[s], pos = first_position(a, s);
        n_tiles += ceil_div(n, step) * n_kv_heads;
        for (int64_t t = 0; t < n; t += step)
            units += (ceil_div(pos + min64(n, t + step), CHUNK) - first_key(a, s, pos + t) / CHUNK) * n_kv_heads;
    }
    int64_t most = max64(1, ceil_div(units, (int64_t)n_threads * ITEMS_PER_THREAD));
    if (n_threads == 1) most = units + 1;
    int64_t item_limit = n_tiles + (units / most) + 1;
    size_t at_tiles = (size_t)round_up(sizeof(attn_plan), 64);
    size_t at_items = at_tiles + (size_t)n_tiles * sizeof(tile_info);
    size_t at_open = at_items + (size_t)item_limit * sizeof(item_info);
    char *memory = scratch_shared(slot, at_open + (size_t)n_tiles * sizeof(atomic_int));
    attn_plan *p = (attn_plan *)memory;
    p->tiles = (tile_info *)(memory + at_tiles);
    p->items = (item_info *)(memory + at_items);
    p->open = (atomic_int *)(memory + at_open);
    p->n_tiles = p->n_items = 0;
    p->group = group;
    p->ov = (int)round_up(dv, 2 * VL);
    p->partial_floats = 0;
    for (int s = 0; s < a->n_seq; s++) {
        int64_t n = a->query_start[s + 1] - a->query_start[s], pos = first_position(a, s);
        /* long tiles first, so that the last to finish are short */
        for (int64_t i = ceil_div(n, step) - 1; i >= 0; i--) {
            int64_t t = i * step, tokens = min64(step, n - t);
            int64_t from = first_key(a, s, pos + t) / CHUNK, to = ceil_div(pos + t + tokens, CHUNK);
            for (int h = 0; h < n_kv_heads; h++) {
                int64_t items = max64(1, ceil_div(to - from, most));
                tile_info *tile = &p->tiles[p->n_tiles];
                *tile = (tile_info){s, h, (int32_t)t, (int32_t)tokens, (int32_t)from, (int32_t)to, (int32_t)items,
                                    p->partial_floats};
                for (int64_t j = 0; j < items; j++)
                    p->items[p->n_items++] = (item_info){p->n_tiles, (int32_t)(from + (to - from) * j / items),
                                                         (int32_t)(from + (to - from) * (j + 1) / items)};
                if (items > 1) p->partial_floats += (to - from) * partial_floats((int)tokens * group, p->ov);
                p->n_tiles++;
            }
        }
    }
    p->partial = scratch_shared(slot + 1, (size_t)p->partial_floats * sizeof(float));
    plan_reset(p);
    return p;
}

/* ---- one chunk of keys and values: where it lies, then made ready for the products ---- */
typedef struct {
    int64_t start; /* position of lane 0 */
    int lo, hi;    /* lanes in use by some row of the tile */
    const char *k_row[CHUNK], *v_row[CHUNK];
    const int8_t *kc[GROUPS], *vc[GROUPS];
    const uint16_t *ks[GROUPS], *vs[GROUPS];
    float k_scale[CHUNK], v_scale[CHUNK];
} chunk_view;

typedef struct {
    const pw_attn *attn;
    const pw_kv *kv;
    int seq, head, ov;
} reader;

static inline int64_t page_of(const reader *r, int64_t slot) {
    return r->attn->page_table[r->seq * r->attn->table_stride + slot / r->kv->page_size];
}

/* words [0, 4) of VL rows, as four vectors of one word of all rows */
AI void transpose_words(const char *const row[], int64_t at, vi out[4]) {
    vi t[4];
    UNROLL for (int i = 0; i < 4; i++) {
#define WORDS(r) _mm_loadu_si128((const __m128i *)(row[(r)] + at))
#ifdef PW_AVX512
        t[i] = _mm512_inserti32x4(_mm512_castsi128_si512(WORDS(i)), WORDS(i + 4), 1);
        t[i] = _mm512_inserti32x4(t[i], WORDS(i + 8), 2);
        t[i] = _mm512_inserti32x4(t[i], WORDS(i + 12), 3);
#else
        t[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(WORDS(i)), WORDS(i + 4), 1);
#endif
#undef WORDS
    }
    vi low0 = iunpack32lo(t[0], t[1]), high0 = iunpack32hi(t[0], t[1]);
    vi low1 = iunpack32lo(t[2], t[3]), high1 = iunpack32hi(t[2], t[3]);
    out[0] = iunpack64lo(low0, low1);
    out[1] = iunpack64hi(low0, low1);
    out[2] = iunpack64lo(high0, high1);
    out[3] = iunpack64hi(high0, high1);
}

/* rows of VL tokens to columns of kt; words of 32 bits are one fp32 number or two bf16 numbers. What is read later is
 * fetched on the way: rows lie apart, and the hardware does not foresee where. */
AI void transpose_keys(const char *const row[], const char *const later[], const char *const last[], int64_t dk, float *kt,
                       const int bf16) {
    const int step = bf16 ? 8 : 4, size = bf16 ? 2 : 4;
    int64_t d = 0;
    for (; d + step <= dk; d += step) {
        vi words[4];
        transpose_words(row, d * size, words);
        UNROLL for (int i = 0; i < 4; i++) {
            if (bf16) {
                istore(kt + (d + 2 * i) * CHUNK, ishl(words[i], 16));
                istore(kt + (d + 2 * i + 1) * CHUNK, iand(words[i], iset((int32_t)0xffff0000)));
            } else {
                istore(kt + (d + i) * CHUNK, words[i]);
            }
        }
        if (d * size % 64 != 0) continue;
        for (int i = 0; i < VL; i++) {
            _mm_prefetch(later[i] + d * size, _MM_HINT_T1);
            _mm_prefetch(last[i] + d * size, _MM_HINT_T1);
        }
    }
    for (; d < dk; d++)
        for (int i = 0; i < VL; i++)
            kt[d * CHUNK + i] = bf16 ? bf16_to_float(((const uint16_t *)row[i])[d]) : ((const float *)row[i])[d];
}

static void copy_value(const char *row, int64_t dv, float *to, int bf16) {
    int64_t d = 0;
    for (; d + VL <= dv; d += VL)
        vstore(to + d, bf16 ? vbf16((const uint16_t *)row + d) : vload((const float *)row + d));
    for (; d < dv; d++) to[d] = bf16 ? bf16_to_float(((const uint16_t *)row)[d]) : ((const float *)row)[d];
}

static void locate_rows(const reader *r, chunk_view *c) {
    const pw_kv *kv = r->kv;
    const int size = kv->format == KV_BF16 ? 2 : 4;
    int64_t slot = c->start + c->lo - r->attn->kv_start[r->seq];
    int64_t page = page_of(r, slot), offset = slot % kv->page_size;
    for (int i = c->lo; i < c->hi; i++, offset++, slot++) {
        if (offset == kv->page_size) {
            page = page_of(r, slot);
            offset = 0;
        }
        c->k_row[i] = (const char *)kv->k + size * (page * kv->k_page + offset * kv->k_token + r->head * kv->k_head);
        c->v_row[i] = (const char *)kv->v + size * (page * kv->v_page + offset * kv->v_token + r->head * kv->v_head);
    }
    for (int i = 0; i < c->lo; i++) c->k_row[i] = c->k_row[c->lo], c->v_row[i] = c->v_row[c->lo];
    for (int i = c->hi; i < CHUNK; i++) c->k_row[i] = c->k_row[c->hi - 1], c->v_row[i] = c->v_row[c->hi - 1];
}

static void load_scales(chunk_view *c) {
    for (int g = c->lo / BLOCK; g * BLOCK < c->hi; g++)
        for (int i = 0; i < BLOCK; i += VL) {
            vstore(c->k_scale + g * BLOCK + i, vhalf(c->ks[g] + i));
            vstore(c->v_scale + g * BLOCK + i, vhalf(c->vs[g] + i));
        }
}

/* fills kt, and v too where the values cannot be used in place */
static void load_numbers(const reader *r, const chunk_view *c, const chunk_view *next, float *kt, float *v, const float **v_used) {
    const pw_kv *kv = r->kv;
    int bf16 = kv->format == KV_BF16, end = (int)round_up(c->hi, VL);
    for (int i = c->lo / VL * VL; i < end; i += VL) {
        if (bf16) transpose_keys(c->k_row + i, c->v_row + i, next->k_row + i, kv->dk, kt + i, 1);
        else transpose_keys(c->k_row + i, c->v_row + i, next->k_row + i, kv->dk, kt + i, 0);
    }
    int in_place = !bf16 && kv->dv == r->ov;
    for (int i = c->lo; i < c->hi; i++) {
        v_used[i] = in_place ? (const float *)c->v_row[i] : v + (int64_t)i * r->ov;
        if (!in_place) copy_value(c->v_row[i], kv->dv, v + (int64_t)i * r->ov, bf16);
    }
}

static void locate_codes(const reader *r, chunk_view *c) {
    const pw_kv *kv = r->kv;
    const int64_t k_wide = int8_width(kv->dk), v_wide = int8_width(kv->dv), first = r->head * (int64_t)kv->page_size;
    for (int g = c->lo / BLOCK; g * BLOCK < c->hi; g++) {
        int64_t slot = c->start + g * BLOCK - r->attn->kv_start[r->seq];
        int64_t page = page_of(r, slot), at = first + slot % kv->page_size;
        c->kc[g] = (const int8_t *)kv->k + page * kv->k_page + at * k_wide;
        c->vc[g] = (const int8_t *)kv->v + page * kv->v_page + at * v_wide;
        c->ks[g] = kv->k_scale + page * kv->k_scale_page + at;
        c->vs[g] = kv->v_scale + page * kv->v_scale_page + at;
        _mm_prefetch((const char *)c->ks[g], _MM_HINT_T0);
        _mm_prefetch((const char *)c->vs[g], _MM_HINT_T0);
        for (int64_t i = 0; i < BLOCK * k_wide; i += 64) _mm_prefetch((const char *)c->kc[g] + i, _MM_HINT_T1);
        for (int64_t i = 0; i < BLOCK * v_wide; i += 64) _mm_prefetch((const char *)c->vc[g] + i, _MM_HINT_T1);
    }
}

/* ---- scores and weighted values of one chunk for up to MT_MAX rows ---- */
static void scores_f32(int mt, const float *q, const float *kt, int dk, float *s, int lo, int hi) {
#define CALL(M) product(q, M, 1, kt, NULL, CHUNK, 0, dk, s, CHUNK, lo, hi, M)
    MT_SWITCH(mt, CALL)
#undef CALL
}

static void values_f32(int mt, const float *p, const float *const *v, int64_t ov, int lo, int hi, float *o) {
#define CALL(M) product(p, 1, CHUNK, NULL, v, 0, lo, hi, o, ov, 0, (int)ov, M)
    MT_SWITCH(mt, CALL)
#undef CALL
}

#ifdef PW_AVX512
#define V_RIGHT (BLOCK * BLOCK)
#else
#define V_RIGHT BLOCK
#endif

AI void scores_codes(const int32_t *q, const float *q_scale, int steps, const chunk_view *c, int g_from, int g_to,
                     float *s, const int mt) {
    vi acc[MT_MAX][2];
    for (int g = g_from; g < g_to; g += 2 * VL / BLOCK) {
        const int8_t *left = c->kc[g];
#ifdef PW_AVX512
        int64_t right = g + 1 < g_to ? c->kc[g + 1] - left : 0;
        int second = g + 1 < g_to ? g + 1 : g;
#else
        int64_t right = BLOCK;
#endif
        product_pairs(q, mt, 1, &left, right, 1, steps, acc, mt, 0);
        vf x = vload(c->k_scale + g * BLOCK);
#ifdef PW_AVX512
        vf y = vload(c->k_scale + second * BLOCK);
#else
        vf y = vload(c->k_scale + g * BLOCK + VL);
#endif
        UNROLL for (int m = 0; m < mt; m++) {
            vf scale = vset(q_scale[m]);
#ifdef PW_AVX512
            vstore(s + m * CHUNK + second * BLOCK, vmul(vcvt(acc[m][1]), vmul(y, scale)));
#else
            vstore(s + m * CHUNK + g * BLOCK + VL, vmul(vcvt(acc[m][1]), vmul(y, scale)));
#endif
            vstore(s + m * CHUNK + g * BLOCK, vmul(vcvt(acc[m][0]), vmul(x, scale)));
        }
    }
}

AI void values_codes(const int32_t *p, const float *p_scale, const chunk_view *c, int g_from, int g_to, int dv,
                     int64_t ov, float *o, const int mt) {
    vi acc[MT_MAX][2];
    const int8_t *groups[GROUPS];
    for (int64_t d = 0; d < dv; d += 2 * VL) {
        for (int g = g_from; g < g_to; g++) groups[g - g_from] = c->vc[g] + d / BLOCK * (BLOCK * BLOCK);
        int64_t right = V_RIGHT;
        if (VL == BLOCK && d + BLOCK >= dv) right = 0;
        product_pairs(p + g_from * (BLOCK / 2), 1, CHUNK / 2, groups, right, g_to - g_from, BLOCK / 2, acc, mt, 0);
        UNROLL for (int m = 0; m < mt; m++) {
            vf scale = vset(p_scale[m]);
            vstore(o + m * ov + d, vmul(vcvt(acc[m][0]), scale));
            vstore(o + m * ov + d + VL, vmul(vcvt(acc[m][1]), scale));
        }
    }
}

#define CHUNK_VECTORS (CHUNK / VL)

/* Scores to weights in place: exp(score - max) within lanes [lo, hi), 0 elsewhere; `full` says that all lanes are in.
 * With codes the weights, times the values' scales, become 15-bit numbers with one scale instead. */
AI void softmax_part(float *s, int lo, int hi, float softcap, float *row_max, float *row_sum, const chunk_view *c,
                     int16_t *p, float *p_scale, const int full) {
    vf x[CHUNK_VECTORS], most = vset(-INFINITY), sum = vset(0);
    UNROLL for (int i = 0; i < CHUNK_VECTORS; i++) {
        x[i] = vload(s + i * VL);
        if (softcap > 0) { /* cap * tanh(x / cap) */
            vf e = vexp(vmul(x[i], vset(2.0f / softcap)));
            x[i] = vmul(vset(softcap), vsub(vset(1.0f), vdiv(vset(2.0f), vadd(e, vset(1.0f)))));
        }
        if (!full) x[i] = vkeep(x[i], vset(-INFINITY), i * VL, lo, hi);
        most = vmax(most, x[i]);
    }
    vf top = vset(vhmax(most));
    UNROLL for (int i = 0; i < CHUNK_VECTORS; i++) {
        x[i] = vexp(vsub(x[i], top));
        if (!full) x[i] = vkeep(x[i], vset(0), i * VL, lo, hi);
        sum = vadd(sum, x[i]);
    }
    vstore(s, top);
    *row_max = s[0];
    *row_sum = vhsum(sum);
    if (p == NULL) {
        UNROLL for (int i = 0; i < CHUNK_VECTORS; i++) vstore(s + i * VL, x[i]);
        return;
    }
    vf largest = vset(0);
    UNROLL for (int i = 0; i < CHUNK_VECTORS; i++) {
        x[i] = vmul(x[i], vload(c->v_scale + i * VL));
        if (!full) x[i] = vkeep(x[i], vset(0), i * VL, lo, hi);
        largest = vmax(largest, x[i]);
    }
    float size = vhmax(largest), inverse = size > 0 ? P_LIMIT / size : 0;
    *p_scale = size / P_LIMIT;
    UNROLL for (int i = 0; i < CHUNK_VECTORS; i++)
        store16(p + i * VL, vcvti(vmin(vmul(x[i], vset(inverse)), vset(P_LIMIT))));
}

static void softmax_row(float *s, int lo, int hi, float softcap, float *row_max, float *row_sum, const chunk_view *c,
                        int16_t *p, float *p_scale) {
    if (lo == 0 && hi == CHUNK) softmax_part(s, lo, hi, softcap, row_max, row_sum, c, p, p_scale, 1);
    else softmax_part(s, lo, hi, softcap, row_max, row_sum, c, p, p_scale, 0);
}

/* ---- one tile ---- */
typedef struct {
    tiling rows;
    int n_rows, group, dk, dv, ov, codes;
    int64_t dk_steps;
    void *q;        /* packed queries of every row tile */
    float *q_scale; /* codes only */
    float *m, *l, *o;
    float *kt, *v; /* numbers only: a chunk as [dk][CHUNK] and [CHUNK][ov] */
    const float *v_used[CHUNK];
    float *s, *oc;
    int16_t *p;
    float *p_scale;
} tile_work;

static void work_init(tile_work *w, const pw_kv *kv, int n_rows, int group, int ov) {
    w->rows = tile_rows(n_rows);
    w->n_rows = n_rows;
    w->group = group;
    w->dk = kv->dk;
    w->dv = kv->dv;
    w->ov = ov;
    w->codes = kv->format == KV_INT8;
    w->dk_steps = w->codes ? int8_width(kv->dk) / 2 : kv->dk;
    int64_t slots = n_rows + MT_MAX * (int64_t)w->rows.n_tiles, at = 0;
    int64_t size[] = {slots * w->dk_steps, slots, slots, slots, (int64_t)n_rows * ov, MT_MAX * CHUNK, MT_MAX * (int64_t)ov,
                      MT_MAX * CHUNK / 2, MT_MAX, w->codes ? 0 : (int64_t)kv->dk * CHUNK, w->codes ? 0 : (int64_t)ov * CHUNK};
    int64_t where[11];
    for (int i = 0; i < 11; i++) {
        where[i] = at;
        at += round_up(size[i], 16);
    }
    float *memory = scratch_thread(TH_ATTN, (size_t)at * sizeof(float));
    w->q = memory + where[0];
    w->q_scale = memory + where[1];
    w->m = memory + where[2];
    w->l = memory + where[3];
    w->o = memory + where[4];
    w->s = memory + where[5];
    w->oc = memory + where[6];
    w->p = (int16_t *)(memory + where[7]);
    w->p_scale = memory + where[8];
    w->kt = memory + where[9];
    w->v = memory + where[10];
}

static void pack_queries(tile_work *w, const float *q, int64_t ldq, float scale) {
    for (int i = 0; i < w->rows.n_tiles; i++) {
        int64_t start = tile_start(&w->rows, i), slot = tile_slot(&w->rows, i);
        int n = tile_count(&w->rows, i), mt = padded_mt(n);
        for (int m = 0; m < n; m++) {
            const float *row = q + (start + m) / w->group * ldq + (start + m) % w->group * w->dk;
            if (!w->codes) {
                float *to = (float *)w->q + slot * w->dk_steps + m;
                for (int d = 0; d < w->dk; d++) to[(int64_t)d * mt] = row[d] * scale;
                continue;
            }
            float padded[2 * w->dk_steps];
            memcpy(padded, row, (size_t)w->dk * sizeof(float));
            for (int d = w->dk; d < 2 * w->dk_steps; d++) padded[d] = 0;
            int32_t *to = (int32_t *)w->q + slot * w->dk_steps + m;
            w->q_scale[slot + m] = put_pairs(padded, 2 * w->dk_steps, Q_LIMIT, to, mt) * scale;
        }
    }
}

/* (max, sum, output) of one chunk for the rows of row tile i, into w->oc and the arrays given */
static void chunk_rows(tile_work *w, const pw_attn *a, const chunk_view *c, int i, int lo, int hi, const int *row_lo, const int *row_hi,
                       float *row_max, float *row_sum) {
    int n = tile_count(&w->rows, i), mt = padded_mt(n);
    int64_t slot = tile_slot(&w->rows, i);
    int g_from = lo / BLOCK, g_to = (int)ceil_div(hi, BLOCK);
    if (w->codes) {
        const int32_t *q = (const int32_t *)w->q + slot * w->dk_steps;
#define CALL(M) scores_codes(q, w->q_scale + slot, (int)w->dk_steps, c, g_from, g_to, w->s, M)
        MT_SWITCH(mt, CALL)
#undef CALL
    } else {
        scores_f32(mt, (const float *)w->q + slot * w->dk_steps, w->kt, w->dk, w->s, lo / (2 * VL) * 2 * VL,
                   (int)round_up(hi, 2 * VL));
    }
    for (int m = 0; m < n; m++)
        softmax_row(w->s + m * CHUNK, row_lo[m], row_hi[m], a->softcap, row_max + m, row_sum + m, c,
                    w->codes ? w->p + m * CHUNK : NULL, w->p_scale + m);
    if (w->codes) {
        const int32_t *p = (const int32_t *)w->p;
        int dv = (int)int8_width(w->dv);
#define CALL(M) values_codes(p, w->p_scale, c, g_from, g_to, dv, w->ov, w->oc, M)
        MT_SWITCH(mt, CALL)
#undef CALL
    } else {
        values_f32(mt, w->s, w->v_used, w->ov, lo, hi, w->oc);
    }
}

/* (m, l, o) of n rows and of one more chunk of theirs, together; a chunk that a row does not see has max -inf */
static void fold(int n, float *m, float *l, float *o, const float *m2, const float *l2, const float *o2, int ov) {
    float top[BLOCK] = {0}, keep[BLOCK] = {0}, add[BLOCK] = {0};
    for (int r = 0; r < n; r++) {
        top[r] = m2[r] > m[r] ? m2[r] : m[r];
        keep[r] = m[r] - top[r];
        add[r] = m2[r] - top[r];
    }
    for (int i = 0; i < BLOCK; i += VL) {
        vstore(keep + i, vexp(vload(keep + i)));
        vstore(add + i, vexp(vload(add + i)));
    }
    for (int r = 0; r < n; r++, o += ov, o2 += ov) {
        if (m2[r] == -INFINITY) continue;
        m[r] = top[r];
        l[r] = l[r] * keep[r] + l2[r] * add[r];
        vf x = vset(keep[r]), y = vset(add[r]);
        for (int d = 0; d < ov; d += VL) vstore(o + d, vfma(vload(o2 + d), y, vmul(vload(o + d), x)));
    }
}

static void finish_row(const pw_attn *a, int head, float m, float l, const float *o, int dv, float *out) {
    float keep = 1;
    if (a->sinks != NULL) {
        float sink = a->sinks[head], top = m > sink ? m : sink;
        keep = m == -INFINITY ? 0 : exp1(m - top);
        l = l * keep + exp1(sink - top);
    }
    float scale = l > 0 ? keep / l : 0;
    for (int d = 0; d < dv; d++) out[d] = o[d] * scale;
}

static void clear_state(tile_work *w) {
    for (int r = 0; r < w->n_rows; r++) {
        w->m[r] = -INFINITY;
        w->l[r] = 0;
    }
    memset(w->o, 0, (size_t)w->n_rows * w->ov * sizeof(float));
}

static void write_tile(tile_work *w, const attn_plan *p, const pw_attn *a, const tile_info *t, int dv, float *out, int64_t ldo) {
    for (int r = 0; r < w->n_rows; r++) {
        int head = t->head * p->group + r % p->group;
        float *to = out + (a->query_start[t->seq] + t->first + r / p->group) * ldo + (int64_t)head * dv;
        finish_row(a, head, w->m[r], w->l[r], w->o + (int64_t)r * w->ov, dv, to);
    }
}

/* where chunk number `chunk` lies for queries at [pos, pos + n_tokens) */
static void locate(const reader *r, chunk_view *c, int64_t chunk, int64_t pos, int n_tokens) {
    c->start = chunk * CHUNK;
    c->lo = (int)max64(0, first_key(r->attn, r->seq, pos) - c->start);
    c->hi = (int)min64(CHUNK, pos + n_tokens - c->start);
    if (r->kv->format == KV_INT8) locate_codes(r, c);
    else locate_rows(r, c);
}

static void run_item(attn_plan *p, const pw_attn *a, const pw_kv *kv, const float *q, int64_t ldq, float *out, int64_t ldo,
                     const item_info *item) {
    tile_work work, *w = &work;
    const tile_info *t = &p->tiles[item->tile];
    work_init(w, kv, t->n_tokens * p->group, p->group, p->ov);
    reader r = {a, kv, t->seq, t->head, p->ov};
    pack_queries(w, q + (a->query_start[t->seq] + t->first) * ldq + (int64_t)t->head * p->group * kv->dk, ldq, a->scale);
    clear_state(w);
    int64_t pos = first_position(a, t->seq) + t->first;
    int64_t padded = round_up(w->n_rows, BLOCK), stride = partial_floats(w->n_rows, w->ov);
    chunk_view views[2];
    locate(&r, &views[item->chunk_from % 2], item->chunk_from, pos, t->n_tokens);
    for (int64_t chunk = item->chunk_from; chunk < item->chunk_to; chunk++) {
        chunk_view *c = &views[chunk % 2], *next = c;
        if (chunk + 1 < item->chunk_to) {
            next = &views[(chunk + 1) % 2];
            locate(&r, next, chunk + 1, pos, t->n_tokens);
        }
        if (w->codes) load_scales(c);
        else load_numbers(&r, c, next, w->kt, w->v, w->v_used);
        float *part = p->partial + t->partial + (chunk - t->chunk_from) * stride;
        for (int i = 0; i < w->rows.n_tiles; i++) {
            int start = (int)tile_start(&w->rows, i), n = tile_count(&w->rows, i);
            int row_lo[MT_MAX], row_hi[MT_MAX], lo = CHUNK, hi = 0;
            float row_max[MT_MAX], row_sum[MT_MAX];
            for (int m = 0; m < n; m++) {
                int64_t at = pos + (start + m) / p->group;
                row_lo[m] = (int)min64(CHUNK, max64(c->lo, first_key(a, t->seq, at) - c->start));
                row_hi[m] = (int)max64(0, min64(c->hi, at + 1 - c->start));
                lo = row_lo[m] < lo ? row_lo[m] : lo;
                hi = row_hi[m] > hi ? row_hi[m] : hi;
            }
            if (lo < hi) chunk_rows(w, a, c, i, lo, hi, row_lo, row_hi, row_max, row_sum);
            for (int m = 0; m < n; m++)
                if (row_lo[m] >= row_hi[m]) row_max[m] = -INFINITY;
            if (t->n_items == 1) {
                fold(n, w->m + start, w->l + start, w->o + (int64_t)start * w->ov, row_max, row_sum, w->oc, w->ov);
                continue;
            }
            memcpy(part + start, row_max, (size_t)n * sizeof(float));
            memcpy(part + padded + start, row_sum, (size_t)n * sizeof(float));
            memcpy(part + 2 * padded + (int64_t)start * w->ov, w->oc, (size_t)n * w->ov * sizeof(float));
        }
    }
    if (t->n_items > 1) {
        if (atomic_fetch_sub(&p->open[item->tile], 1) != 1) return;
        const float *part = p->partial + t->partial;
        for (int64_t chunk = t->chunk_from; chunk < t->chunk_to; chunk++, part += stride)
            for (int start = 0; start < w->n_rows; start += BLOCK)
                fold((int)min64(BLOCK, w->n_rows - start), w->m + start, w->l + start, w->o + (int64_t)start * w->ov, part + start,
                     part + padded + start, part + 2 * padded + (int64_t)start * w->ov, w->ov);
    }
    write_tile(w, p, a, t, kv->dv, out, ldo);
}

void attend(attn_plan *p, const pw_attn *a, const pw_kv *kv, const float *q, int64_t ldq, float *out, int64_t ldo) {
    for (;;) {
        int i = atomic_fetch_add(&p->next, 1);
        if (i >= p->n_items) return;
        run_item(p, a, kv, q, ldq, out, ldo, &p->items[i]);
    }
}

typedef struct {
    attn_plan *plan;
    const pw_attn *attn;
    const pw_kv *kv;
    const float *q;
    float *out;
    int64_t ldq, ldo;
} attn_job;

static void attn_main(int thread, int n_threads, void *arg) {
    attn_job *j = arg;
    if (thread == 0) {
        j->plan = plan_attention(j->attn, j->kv->n_heads, j->kv->dv, n_threads, SH_PLAN);
    }
    barrier();
    attend(j->plan, j->attn, j->kv, j->q, j->ldq, j->out, j->ldo);
}

EXPORT void pw_attention(const pw_attn *a, const pw_kv *kv, const float *q, int64_t ldq, float *out, int64_t ldo, int n_threads) {
    attn_job j = {NULL, a, kv, q, out, ldq, ldo};
    run_parallel(n_threads, attn_main, &j);
}
