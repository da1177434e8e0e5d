/* Paged attention over ragged batches: prefill and decode are one path.
 *
 * A tile is some neighbouring queries of one sequence times the heads that share one key head; it reads keys and
 * values in chunks of CHUNK positions. Each chunk gives (max, sum, output) of its own, and these are folded from
 * left to right. A chunk's result depends on the row and the chunk alone, so the same bits come out however a
 * prompt is cut, whoever shares the batch, and however chunks are spread over threads.
 *
 * Few rows (decode): the lanes of a vector are keys, and some chunks are worked on at once, so that the waits of one
 * are filled by the others. Many rows (prefill): the lanes are rows, and nothing is summed across lanes. Both do the
 * same operations in the same order for each row. Scores and maxima are in log2 units.
 */
#include <stdatomic.h>

#include "products.h"
#include "rows.h"

#define CHUNK 64
#define GROUPS (CHUNK / BLOCK)
#define TILE_ROWS 96
#define WIDE (2 * VL)         /* rows of a block of a wide tile; the last may have VL */
#define AT_ONCE 4             /* chunks of a narrow tile */
#define LOG2E 1.44269504088896341f
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
static int64_t partial_floats(int n_rows, int ov) { return (2 + ov) * round_up(n_rows, BLOCK); }

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
    union {
        struct {
            const char *k_row[CHUNK], *v_row[CHUNK];
        };
        struct {
            const int8_t *kc[GROUPS], *vc[GROUPS];
            const uint16_t *ks[GROUPS], *vs[GROUPS];
            float k_scale[CHUNK], v_scale[CHUNK];
        };
    };
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

static void load_keys(const reader *r, const chunk_view *c, const chunk_view *next, float *kt) {
    for (int i = c->lo / VL * VL, end = (int)round_up(c->hi, VL); i < end; i += VL) {
        if (r->kv->format == KV_BF16) transpose_keys(c->k_row + i, c->v_row + i, next->k_row + i, r->kv->dk, kt + i, 1);
        else transpose_keys(c->k_row + i, c->v_row + i, next->k_row + i, r->kv->dk, kt + i, 0);
    }
}

/* values are used in place where they can be */
static void load_values(const reader *r, const chunk_view *c, float *v, const float **v_used) {
    int bf16 = r->kv->format == KV_BF16, in_place = !bf16 && r->kv->dv == r->ov;
    for (int i = c->lo; i < c->hi; i++) {
        v_used[i] = in_place ? (const float *)c->v_row[i] : v + (int64_t)i * r->ov;
        if (!in_place) copy_value(c->v_row[i], r->kv->dv, v + (int64_t)i * r->ov, bf16);
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

/* scores of log2 units as softcap * tanh(score / softcap), the cap being in log2 units too */
AI vf cap_scores(vf x, float cap) {
    vf e = vexp2(vsub(vset(0), vmul(vabs(x), vset(2.0f * LOG2E / cap))));
    vf tanh = vdiv(vsub(vset(1.0f), e), vadd(vset(1.0f), e));
    return vsign(vmul(vset(cap), tanh), x);
}

/* weights, times the values' scales, as 15-bit numbers with one scale */
AI vi weight_codes(vf x, vf inverse) { return vcvti(vmin(vmul(x, inverse), vset(P_LIMIT))); }

/* ---- one item's memory ---- */
typedef struct {
    const pw_attn *attn;
    reader read;
    int n_rows, mt, group, dk, dv, ov, codes; /* dv: padded to what a page holds */
    int64_t steps;                            /* of a score: numbers or pairs of codes */
    int64_t pos;                              /* of the tile's first query */
    float cap;                                /* softcap in log2 units */
    float *q;       /* narrow: [steps][mt]; wide: blocks of [steps][rows] */
    float *q_scale; /* codes only */
    float *m, *l, *o;
    float *kt, *v; /* a chunk as [steps][CHUNK] and [CHUNK or its pairs][dv] */
    const float *v_used[CHUNK];
    float *s, *p, *oc; /* of one chunk, or of AT_ONCE: scores, weights, outputs */
    float *p_scale;
} tile_work;

static int is_wide(int n_rows) { return n_rows > MT_MAX; }

static void work_init(tile_work *w, const pw_kv *kv, int n_rows, int ov) {
    w->n_rows = n_rows;
    w->dk = kv->dk;
    w->ov = ov;
    w->codes = kv->format == KV_INT8;
    w->dv = w->codes ? (int)int8_width(kv->dv) : ov;
    w->steps = w->codes ? int8_width(kv->dk) / 2 : kv->dk;
    w->mt = is_wide(n_rows) ? 0 : padded_mt(n_rows);
    int64_t rows = round_up(n_rows, BLOCK), busy = is_wide(n_rows) ? WIDE : AT_ONCE * MT_MAX, at = 0;
    int64_t size[] = {rows * w->steps, rows, rows, rows, rows * ov, w->steps * CHUNK, (int64_t)CHUNK * ov, busy * CHUNK, busy * CHUNK,
                      busy * ov, busy};
    float **where[] = {&w->q, &w->q_scale, &w->m, &w->l, &w->o, &w->kt, &w->v, &w->s, &w->p, &w->oc, &w->p_scale};
    for (int i = 0; i < 11; i++) at += round_up(size[i], BLOCK);
    float *memory = scratch_thread(TH_ATTN, (size_t)at * sizeof(float));
    for (int i = 0; i < 11; i++) {
        *where[i] = memory;
        memory += round_up(size[i], BLOCK);
    }
    for (int64_t r = 0; r < rows; r++) {
        w->m[r] = -INFINITY;
        w->l[r] = 0;
    }
    memset(w->o, 0, (size_t)(rows * ov) * sizeof(float));
}

static void pack_queries(tile_work *w, const float *q, int64_t ldq, float scale) {
    float *to = w->q;
    int64_t stride = w->mt;
    if (is_wide(w->n_rows)) memset(w->q, 0, (size_t)(round_up(w->n_rows, BLOCK) * w->steps) * sizeof(float));
    for (int r = 0; r < w->n_rows; r++, to++) {
        const float *row = q + r / w->group * ldq + r % w->group * w->dk;
        if (is_wide(w->n_rows) && r % WIDE == 0) {
            stride = min64(WIDE, round_up(w->n_rows - r, VL));
            to = w->q + r * w->steps;
        }
        if (!w->codes) {
            for (int d = 0; d < w->dk; d++) to[d * stride] = row[d] * scale;
            continue;
        }
        float padded[2 * w->steps];
        memcpy(padded, row, (size_t)w->dk * sizeof(float));
        for (int d = w->dk; d < 2 * w->steps; d++) padded[d] = 0;
        w->q_scale[r] = put_pairs(padded, 2 * w->steps, Q_LIMIT, (int32_t *)to, stride) * scale;
    }
}

/* keys [lo, hi) of a chunk that a row sees; none: lo >= hi */
static void row_range(const tile_work *w, const chunk_view *c, int row, int *lo, int *hi) {
    int64_t at = w->pos + min64(row, w->n_rows - 1) / w->group;
    *lo = (int)min64(CHUNK, max64(c->lo, first_key(w->attn, w->read.seq, at) - c->start));
    *hi = (int)max64(0, min64(c->hi, at + 1 - c->start));
}

/* ---- narrow tiles: lanes are keys ---- */
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
        int second = (g + 1 < g_to ? g + 1 : g) * BLOCK;
#else
        int64_t right = BLOCK;
        int second = g * BLOCK + VL;
#endif
        product_pairs(q, mt, 1, &left, right, 1, steps, acc, mt, 0);
        vf x = vload(c->k_scale + g * BLOCK), y = vload(c->k_scale + second);
        UNROLL for (int m = 0; m < mt; m++) {
            vf scale = vset(q_scale[m]);
            vstore(s + m * CHUNK + second, vmul(vmul(vcvt(acc[m][1]), y), scale));
            vstore(s + m * CHUNK + g * BLOCK, vmul(vmul(vcvt(acc[m][0]), x), scale));
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

/* Scores to weights in place: 2^(score - max) within lanes [lo, hi), 0 elsewhere; `full` says that all lanes are in. */
AI void softmax_row(float *s, int lo, int hi, float cap, float *row_max, float *row_sum, const float *v_scale, int16_t *p,
                    float *p_scale, const int full) {
    vf x[CHUNK_VECTORS], most = vset(-INFINITY), sum = vset(0);
    UNROLL for (int i = 0; i < CHUNK_VECTORS; i++) {
        x[i] = vload(s + i * VL);
        if (cap > 0) x[i] = cap_scores(x[i], cap);
        if (!full) x[i] = vkeep(x[i], vset(-INFINITY), i * VL, lo, hi);
        most = vmax(most, x[i]);
    }
    vf top = vset(vhmax(most));
    UNROLL for (int i = 0; i < CHUNK_VECTORS; i++) {
        x[i] = vexp2(vsub(x[i], top));
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
        x[i] = vmul(x[i], vload(v_scale + i * VL));
        if (!full) x[i] = vkeep(x[i], vset(0), i * VL, lo, hi);
        largest = vumax(largest, x[i]);
    }
    float size = vhumax(largest), inverse = size > 0 ? P_LIMIT / size : 0;
    *p_scale = size / P_LIMIT;
    UNROLL for (int i = 0; i < CHUNK_VECTORS; i++) store16(p + i * VL, weight_codes(x[i], vset(inverse)));
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
        vstore(keep + i, vexp2(vload(keep + i)));
        vstore(add + i, vexp2(vload(add + i)));
    }
    for (int r = 0; r < n; r++, o += ov, o2 += ov) {
        if (m2[r] == -INFINITY) continue;
        m[r] = top[r];
        l[r] = l[r] * keep[r] + l2[r] * add[r];
        vf x = vset(keep[r]), y = vset(add[r]);
        for (int d = 0; d < ov; d += VL) vstore(o + d, vfma(vload(o2 + d), y, vmul(vload(o + d), x)));
    }
}

typedef struct {
    int lo, hi; /* keys that any row sees */
    float max[BLOCK], sum[BLOCK];
} narrow_chunk;

static void narrow_scores(tile_work *w, const chunk_view *c, const chunk_view *next, int slot, narrow_chunk *n) {
    float *s = w->s + slot * MT_MAX * CHUNK;
    int16_t *p = (int16_t *)(w->p + slot * MT_MAX * CHUNK);
    int lo[MT_MAX], hi[MT_MAX], mt = w->mt;
    n->lo = CHUNK, n->hi = 0;
    for (int m = 0; m < w->n_rows; m++) {
        row_range(w, c, m, &lo[m], &hi[m]);
        n->lo = lo[m] < n->lo ? lo[m] : n->lo;
        n->hi = hi[m] > n->hi ? hi[m] : n->hi;
    }
    if (w->codes) {
        int from = n->lo / BLOCK, to = (int)ceil_div(n->hi, BLOCK);
#define CALL(M) scores_codes((const int32_t *)w->q, w->q_scale, (int)w->steps, c, from, to, s, M)
        MT_SWITCH(mt, CALL)
#undef CALL
    } else {
        load_keys(&w->read, c, next, w->kt);
        int from = n->lo / (2 * VL) * 2 * VL, to = (int)round_up(n->hi, 2 * VL);
#define CALL(M) product(w->q, M, 1, w->kt, NULL, CHUNK, 0, w->dk, s, CHUNK, from, to, M)
        MT_SWITCH(mt, CALL)
#undef CALL
    }
    for (int m = 0; m < w->n_rows; m++) {
        int16_t *codes = w->codes ? p + m * CHUNK : NULL;
        float *row = s + m * CHUNK, *scale = w->p_scale + slot * MT_MAX + m;
        if (lo[m] == 0 && hi[m] == CHUNK) softmax_row(row, 0, CHUNK, w->cap, n->max + m, n->sum + m, c->v_scale, codes, scale, 1);
        else softmax_row(row, lo[m], hi[m], w->cap, n->max + m, n->sum + m, c->v_scale, codes, scale, 0);
        if (lo[m] >= hi[m]) n->max[m] = -INFINITY;
    }
}

static float *narrow_values(tile_work *w, const chunk_view *c, int slot, const narrow_chunk *n) {
    float *o = w->oc + slot * MT_MAX * w->ov;
    if (w->codes) {
        int from = n->lo / BLOCK, to = (int)ceil_div(n->hi, BLOCK);
        const int32_t *p = (const int32_t *)(w->p + slot * MT_MAX * CHUNK);
#define CALL(M) values_codes(p, w->p_scale + slot * MT_MAX, c, from, to, w->dv, w->ov, o, M)
        MT_SWITCH(w->mt, CALL)
#undef CALL
    } else {
        const float *s = w->s + slot * MT_MAX * CHUNK;
        load_values(&w->read, c, w->v, w->v_used);
#define CALL(M) product(s, 1, CHUNK, NULL, w->v_used, 0, n->lo, n->hi, o, w->ov, 0, w->ov, M)
        MT_SWITCH(w->mt, CALL)
#undef CALL
    }
    return o;
}

/* where chunk number `chunk` lies for the tile's queries */
static void locate(const tile_work *w, chunk_view *c, int64_t chunk, int n_tokens) {
    c->start = chunk * CHUNK;
    c->lo = (int)max64(0, first_key(w->attn, w->read.seq, w->pos) - c->start);
    c->hi = (int)min64(CHUNK, w->pos + n_tokens - c->start);
    if (w->codes) locate_codes(&w->read, c);
    else locate_rows(&w->read, c);
}

static void keep_partial(const tile_work *w, float *part, const float *max, const float *sum, const float *o, int64_t row, int64_t n) {
    int64_t padded = round_up(w->n_rows, BLOCK);
    memcpy(part + row, max, (size_t)n * sizeof(float));
    memcpy(part + padded + row, sum, (size_t)n * sizeof(float));
    memcpy(part + 2 * padded + row * w->ov, o, (size_t)(n * w->ov) * sizeof(float));
}

/* chunks [from, to); without `part` they are folded right away */
static void run_narrow(tile_work *w, int from, int to, int n_tokens, float *part) {
    chunk_view views[2][AT_ONCE];
    narrow_chunk done[AT_ONCE];
    for (int i = 0; i < AT_ONCE && from + i < to; i++) locate(w, &views[0][i], from + i, n_tokens);
    for (int turn = 0, at = from; at < to; turn ^= 1, at += AT_ONCE) {
        int n = (int)min64(AT_ONCE, to - at);
        for (int i = 0; i < n; i++) {
            chunk_view *c = &views[turn][i], *next = c;
            if (at + AT_ONCE + i < to) {
                next = &views[turn ^ 1][i];
                locate(w, next, at + AT_ONCE + i, n_tokens);
            }
            if (w->codes) load_scales(c);
            narrow_scores(w, c, next, i, &done[i]);
        }
        for (int i = 0; i < n; i++) {
            const float *o = narrow_values(w, &views[turn][i], i, &done[i]);
            if (part == NULL) {
                fold(w->n_rows, w->m, w->l, w->o, done[i].max, done[i].sum, o, w->ov);
                continue;
            }
            keep_partial(w, part, done[i].max, done[i].sum, o, 0, w->n_rows);
            part += partial_floats(w->n_rows, w->ov);
        }
    }
}

/* ---- wide tiles: lanes are rows ---- */
static void widen_codes(tile_work *w, const chunk_view *c) {
    int32_t *kt = (int32_t *)w->kt, *v = (int32_t *)w->v;
    for (int g = c->lo / BLOCK; g * BLOCK < c->hi; g++) {
        for (int64_t d = 0; d < w->steps; d++)
            for (int i = 0; i < BLOCK; i += VL) istore(kt + d * CHUNK + g * BLOCK + i, widen8(c->kc[g] + (d * BLOCK + i) * 2));
        for (int64_t b = 0; b < w->dv / BLOCK; b++)
            for (int64_t pair = 0; pair < BLOCK / 2; pair++)
                for (int i = 0; i < BLOCK; i += VL)
                    istore(v + (g * BLOCK / 2 + pair) * w->dv + b * BLOCK + i, widen8(c->vc[g] + ((b * BLOCK / 2 + pair) * BLOCK + i) * 2));
    }
}

AI void wide_scores(const tile_work *w, const chunk_view *c, int row, int from, int to, const int nv) {
    const float *q = w->q + row * w->steps;
    const int width = nv * VL;
    for (int j = from; j < to; j += COLUMNS) {
        float *s = w->s + j * width;
        if (!w->codes) {
            vf acc[COLUMNS][2];
            row_product(q, width, w->kt, NULL, CHUNK, j, 0, w->dk, acc, nv);
            UNROLL for (int i = 0; i < COLUMNS; i++) UNROLL for (int v = 0; v < nv; v++) vstore(s + i * width + v * VL, acc[i][v]);
            continue;
        }
        vi acc[COLUMNS][2];
        row_product_pairs((const int32_t *)q, width, (const int32_t *)w->kt + j, CHUNK, 0, (int)w->steps, acc, nv);
        UNROLL for (int v = 0; v < nv; v++) {
            vf scale = vload(w->q_scale + row + v * VL);
            UNROLL for (int i = 0; i < COLUMNS; i++)
                vstore(s + i * width + v * VL, vmul(vmul(vcvt(acc[i][v]), vset(c->k_scale[j + i])), scale));
        }
    }
}

/* the sum of a column over keys, in the order in which softmax_row adds */
AI vf column_sum(const float *s, const int width) {
    vf sum[VL];
    UNROLL for (int i = 0; i < VL; i++) {
        sum[i] = vload(s + i * width);
        UNROLL for (int j = VL; j < CHUNK; j += VL) sum[i] = vadd(sum[i], vload(s + (i + j) * width));
    }
    UNROLL for (int half = VL / 2; half > 0; half /= 2)
        UNROLL for (int i = 0; i < half; i++) sum[i] = vadd(sum[i], sum[i + half]);
    return sum[0];
}

/* As softmax_row for VL rows at once, over keys [from, to). Row i sees keys [lo[i], hi[i]). */
AI void softmax_columns(float *s, float *p, int from, int to, vi lo, vi hi, float cap, const chunk_view *c, float *row_max,
                        float *row_sum, float *p_scale, const int width, const int codes, const int full) {
    vf top = vset(-INFINITY), largest = vset(0);
    for (int j = from; j < to; j++) {
        vf x = vload(s + j * width);
        if (cap > 0) x = cap_scores(x, cap);
        if (!full) x = vkeep_rows(x, vset(-INFINITY), j, lo, hi);
        if (!full || cap > 0) vstore(s + j * width, x);
        top = vmax(top, x);
    }
    for (int j = from; j < to; j++) {
        vf x = vexp2(vsub(vload(s + j * width), top));
        if (!full) x = vkeep_rows(x, vset(0), j, lo, hi);
        vstore(s + j * width, x);
        if (!codes) continue;
        x = vmul(x, vset(c->v_scale[j]));
        if (!full) x = vkeep_rows(x, vset(0), j, lo, hi);
        vstore(p + j * width, x);
        largest = vumax(largest, x);
    }
    for (int j = 0; j < from; j++) vstore(s + j * width, vset(0));
    for (int j = to; j < CHUNK; j++) vstore(s + j * width, vset(0));
    vstore(row_max, top);
    vstore(row_sum, column_sum(s, width));
    if (!codes) return;
    vf inverse = vpositive(largest, vdiv(vset(P_LIMIT), largest));
    vstore(p_scale, vdiv(largest, vset(P_LIMIT)));
    for (int j = from; j < to; j += 2) {
        vi even = weight_codes(vload(p + j * width), inverse), odd = weight_codes(vload(p + (j + 1) * width), inverse);
        istore(s + j / 2 * width, ior(even, ishl(odd, 16)));
    }
}

AI void wide_values(const tile_work *w, const chunk_view *c, int from, int to, const int nv) {
    const int width = nv * VL;
    for (int d = 0; d < w->dv; d += COLUMNS) {
        float *o = w->oc + (int64_t)d * width;
        if (!w->codes) {
            vf acc[COLUMNS][2];
            row_product(w->s, width, NULL, w->v_used, 0, d, (int)max64(from, c->lo), (int)min64(to, c->hi), acc, nv);
            UNROLL for (int i = 0; i < COLUMNS; i++) UNROLL for (int v = 0; v < nv; v++) vstore(o + i * width + v * VL, acc[i][v]);
            continue;
        }
        vi acc[COLUMNS][2];
        row_product_pairs((const int32_t *)w->s, width, (const int32_t *)w->v + d, w->dv, from / 2, to / 2, acc, nv);
        UNROLL for (int v = 0; v < nv; v++) {
            vf scale = vload(w->p_scale + v * VL);
            UNROLL for (int i = 0; i < COLUMNS; i++) vstore(o + i * width + v * VL, vmul(vcvt(acc[i][v]), scale));
        }
    }
}

AI void fold_columns(tile_work *w, int row, const float *m2, const float *l2, const float *o2, const int nv) {
    const int width = nv * VL;
    UNROLL for (int v = 0; v < nv; v++) {
        float *m = w->m + row + v * VL, *l = w->l + row + v * VL, *o = w->o + (int64_t)row * w->ov + v * VL;
        const float *more = o2 + v * VL;
        vf old = vload(m), chunk = vload(m2 + v * VL), top = vmax(chunk, old);
        vf keep = vexp2(vsub(old, top)), add = vexp2(vsub(chunk, top));
        /* a row that sees nothing of the chunk stays as it is */
        keep = vseen(keep, vset(1.0f), chunk);
        add = vseen(add, vset(0), chunk);
        vstore(m, vseen(top, old, chunk));
        vstore(l, vadd(vmul(vload(l), keep), vmul(vload(l2 + v * VL), add)));
        for (int d = 0; d < w->ov; d++) vstore(o + d * width, vfma(vload(more + d * width), add, vmul(vload(o + d * width), keep)));
    }
}

/* a chunk for the rows from `row` on: lanes of one or two vectors */
AI void wide_block(tile_work *w, const chunk_view *c, int row, float *part, const int nv) {
    const int width = nv * VL;
    int32_t lo[WIDE], hi[WIDE];
    int from = CHUNK, to = 0, full = 1;
    float max[WIDE], sum[WIDE];
    for (int i = 0; i < width; i++) {
        int a, b;
        row_range(w, c, row + i, &a, &b);
        lo[i] = a, hi[i] = b;
        from = a < from ? a : from;
        to = b > to ? b : to;
        full &= a == 0 && b == CHUNK;
    }
    if (from < to) {
        from = from / COLUMNS * COLUMNS;
        to = (int)round_up(to, COLUMNS);
        wide_scores(w, c, row, from, to, nv);
        UNROLL for (int v = 0; v < nv; v++) {
            float *s = w->s + v * VL, *p = w->p + v * VL;
            vi first = iload(lo + v * VL), last = iload(hi + v * VL);
            if (w->codes && full) softmax_columns(s, p, 0, CHUNK, first, last, w->cap, c, max + v * VL, sum + v * VL, w->p_scale + v * VL, width, 1, 1);
            else if (w->codes) softmax_columns(s, p, from, to, first, last, w->cap, c, max + v * VL, sum + v * VL, w->p_scale + v * VL, width, 1, 0);
            else if (full) softmax_columns(s, p, 0, CHUNK, first, last, w->cap, c, max + v * VL, sum + v * VL, NULL, width, 0, 1);
            else softmax_columns(s, p, from, to, first, last, w->cap, c, max + v * VL, sum + v * VL, NULL, width, 0, 0);
        }
        wide_values(w, c, from, to, nv);
    } else {
        memset(sum, 0, sizeof(sum));
        memset(w->oc, 0, (size_t)(w->ov * width) * sizeof(float));
    }
    for (int i = 0; i < width; i++)
        if (lo[i] >= hi[i]) max[i] = -INFINITY;
    if (part) keep_partial(w, part, max, sum, w->oc, row, width);
    else fold_columns(w, row, max, sum, w->oc, nv);
}

static void run_wide(tile_work *w, int from, int to, int n_tokens, float *part) {
    chunk_view views[2];
    locate(w, &views[0], from, n_tokens);
    for (int at = from; at < to; at++) {
        chunk_view *c = &views[(at - from) % 2], *next = c;
        if (at + 1 < to) {
            next = &views[(at + 1 - from) % 2];
            locate(w, next, at + 1, n_tokens);
        }
        if (w->codes) {
            load_scales(c);
            widen_codes(w, c);
        } else {
            load_keys(&w->read, c, next, w->kt);
            load_values(&w->read, c, w->v, w->v_used);
        }
        for (int row = 0; row < w->n_rows; row += WIDE) {
            if (w->n_rows - row > VL) wide_block(w, c, row, part, 2);
            else wide_block(w, c, row, part, 1);
        }
        if (part) part += partial_floats(w->n_rows, w->ov);
    }
}

/* ---- items and tiles ---- */
static void fold_partial(tile_work *w, const float *part) {
    int64_t padded = round_up(w->n_rows, BLOCK);
    const float *l = part + padded, *o = part + 2 * padded;
    if (!is_wide(w->n_rows)) {
        fold(w->n_rows, w->m, w->l, w->o, part, l, o, w->ov);
        return;
    }
    for (int row = 0; row < w->n_rows; row += WIDE) {
        if (w->n_rows - row > VL) fold_columns(w, row, part + row, l + row, o + (int64_t)row * w->ov, 2);
        else fold_columns(w, row, part + row, l + row, o + (int64_t)row * w->ov, 1);
    }
}

/* what a row's sums are multiplied by in the end */
static float row_factor(const pw_attn *a, int head, float m, float l) {
    float keep = 1;
    if (a->sinks != NULL) {
        float sink = a->sinks[head] * LOG2E, top = m > sink ? m : sink;
        keep = m == -INFINITY ? 0 : exp2_one(m - top);
        l = l * keep + exp2_one(sink - top);
    }
    return l == 0 ? 0 : keep / l;
}

static float *out_row(const tile_work *w, int row, float *out, int64_t ldo, int dv) {
    return out + row / w->group * ldo + (int64_t)(w->read.head * w->group + row % w->group) * dv;
}

/* `out`: of the tile's first token */
static void write_tile(tile_work *w, float *out, int64_t ldo, int dv) {
    float *factor = w->l;
    for (int r = 0; r < w->n_rows; r++)
        factor[r] = row_factor(w->attn, w->read.head * w->group + r % w->group, w->m[r], w->l[r]);
    if (!is_wide(w->n_rows)) {
        for (int r = 0; r < w->n_rows; r++)
            for (int d = 0; d < dv; d++) out_row(w, r, out, ldo, dv)[d] = w->o[(int64_t)r * w->ov + d] * factor[r];
        return;
    }
    for (int row = 0; row < w->n_rows; row += 4) {
        int first = row / WIDE * WIDE;
        int64_t width = min64(WIDE, round_up(w->n_rows - first, VL));
        for (int d = 0; d < dv; d += VL) {
            const char *lines[VL];
            vi words[4];
            float part[VL];
            for (int i = 0; i < VL; i++) lines[i] = (const char *)(w->o + (int64_t)first * w->ov + (d + i) * width);
            transpose_words(lines, (row - first) * 4, words);
            for (int i = 0; i < 4 && row + i < w->n_rows; i++) {
                vstore(part, vmul(vload((const float *)&words[i]), vset(factor[row + i])));
                memcpy(out_row(w, row + i, out, ldo, dv) + d, part, (size_t)min64(VL, dv - d) * sizeof(float));
            }
        }
    }
}

static void run_item(attn_plan *p, const pw_attn *a, const pw_kv *kv, const float *q, int64_t ldq, float *out, int64_t ldo,
                     const item_info *item) {
    const tile_info *t = &p->tiles[item->tile];
    int64_t row = a->query_start[t->seq] + t->first;
    tile_work work = {.attn = a, .read = {a, kv, t->seq, t->head, p->ov}, .group = p->group, .cap = a->softcap * LOG2E,
                      .pos = first_position(a, t->seq) + t->first}, *w = &work;
    work_init(w, kv, t->n_tokens * p->group, p->ov);
    pack_queries(w, q + row * ldq + (int64_t)t->head * p->group * kv->dk, ldq, a->scale * LOG2E);
    float *parts = t->n_items > 1 ? p->partial + t->partial : NULL;
    int64_t stride = partial_floats(w->n_rows, w->ov);
    float *part = parts ? parts + (item->chunk_from - t->chunk_from) * stride : NULL;
    if (is_wide(w->n_rows)) run_wide(w, item->chunk_from, item->chunk_to, t->n_tokens, part);
    else run_narrow(w, item->chunk_from, item->chunk_to, t->n_tokens, part);
    if (parts) {
        if (atomic_fetch_sub(&p->open[item->tile], 1) != 1) return;
        for (int i = 0; i < t->chunk_to - t->chunk_from; i++) fold_partial(w, parts + i * stride);
    }
    write_tile(w, out + row * ldo, ldo, kv->dv);
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
