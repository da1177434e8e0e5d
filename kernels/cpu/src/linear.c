/* Products with packed weights.
 *
 * Weights lie in blocks of 16 rows, so that one vector holds the same input of 16 (or twice 8) outputs:
 *   W_F32   [blocks][k][16] floats
 *   W_INT8  [blocks][k / 2][16][2] codes, one scale a row
 *   W_Q8    [blocks][k / 32] of { [16][16][2] codes, [16] half scales }                        544 bytes
 *   W_Q4_1  [blocks][k / 32] of { [4][16][4] nibbles, [16] half scales, [16] half minima }     320 bytes
 *   W_Q4_0  the same without minima, value = scale * (code - 8)                                288 bytes
 * In nibbles, byte [s][row][i] holds input 4 * s + i in its low half and input 16 + 4 * s + i in its high half.
 *
 * int8 weights meet 14-bit activations, one scale a token; 4-bit weights meet 8-bit activations, one scale for each
 * 32 inputs. Where a weight asks for more planes, what rounding left is rounded again, and the products are added.
 * Sums of integers are exact, so no split of the work changes a result.
 */
#include <stdlib.h>

#include "products.h"
#include "rows.h"

#define GROUP 32
#define A_LIMIT 8191.0f
#define EXACT_K 2048 /* 127 * 8191 * 2048 fits 32 bits */
#define SUPER_ROWS 96
#define FACTORS 3
#define EXACT_PLANES 3 /* 4-bit weights: what one pass over the weights takes */
#ifdef PW_AVX512
#define EXACT_ROWS 6 /* whose sums fit the registers */
#else
#define EXACT_ROWS 2
#endif
/* Sums of 4-bit by 8-bit codes start at these bits, so that they are the float MAGIC + sum without a conversion */
#define MAGIC 12582912.0f
#define MAGIC_BITS 0x4b400000
#define Q8_BYTES 544
#define Q4_1_BYTES 320
#define Q4_0_BYTES 288

static int act_kind(int kind) { return kind == W_F32 ? A_F32 : kind == W_INT8 || kind == W_Q8 ? A_INT16 : A_INT8; }

static int act_planes(const pw_linear *w) { return w->kind == W_F32 || w->planes < 1 ? 1 : w->planes; }

static int64_t code_size(int kind) { return kind == A_F32 ? 4 : kind == A_INT16 ? 2 : 1; }

static int64_t act_slots(int64_t rows) { return rows + MT_MAX * ceil_div(rows, MT_MAX); }

static int64_t plane_bytes(const pw_linear *w, int64_t rows) {
    int64_t slots = act_slots(rows), k = round_up(w->k, GROUP);
    return round_up(slots * k * code_size(act_kind(w->kind)), 64) + round_up(FACTORS * slots * (k / GROUP) * 4, 64);
}

size_t act_bytes(const pw_linear *w, int64_t rows) { return (size_t)(act_planes(w) * plane_bytes(w, rows)); }

void act_init(activations *a, const pw_linear *w, int64_t rows, void *memory) {
    int64_t slots = act_slots(rows);
    a->kind = act_kind(w->kind);
    a->planes = act_planes(w);
    a->k = round_up(w->k, GROUP);
    a->plane_bytes = plane_bytes(w, rows);
    a->tiles = tile_rows(rows);
    a->codes = memory;
    a->factors = (float *)((char *)memory + round_up(slots * a->k * code_size(a->kind), 64));
}

static int in_one_pass(const activations *a) { return a->kind == A_INT8 && a->planes == EXACT_PLANES; }

static activations plane_of(const activations *a, int plane) {
    activations p = *a;
    p.planes = 1;
    p.codes = (char *)a->codes + plane * a->plane_bytes;
    p.factors = (float *)((char *)a->factors + plane * a->plane_bytes);
    return p;
}

/* of a group's largest number; its last two bits are clear, so that its product with MAGIC is exact */
static float group_scale(float top) {
    union { float f; uint32_t u; } scale = {.f = top / 127.0f};
    if (top == top) scale.u &= ~3u;
    return scale.f;
}

static void put_int8(activations *a, int64_t slot, int m, int mt, const float *row) {
    int32_t *to = (int32_t *)a->codes + slot * a->k / 4 + m;
    for (int64_t g = 0; g < a->k / GROUP; g++) {
        const float *x = row + g * GROUP;
        float top = row_top(x, GROUP), inverse = top > 0 ? 127.0f / top : 0, scale = group_scale(top);
        vf sum = vset(0);
        int8_t codes[GROUP + VL];
        int32_t quads[GROUP / 4];
        for (int i = 0; i < GROUP; i += VL) {
            vi c = vcvti(vmul(vload(x + i), vset(inverse)));
            sum = vadd(sum, vcvt(c));
            store8(codes + i, c);
        }
        memcpy(quads, codes, GROUP);
        for (int j = 0; j < GROUP / 4; j++) to[(g * (GROUP / 4) + j) * mt] = quads[j];
        float *factor = a->factors + FACTORS * (slot * (a->k / GROUP) + g * mt) + m;
        factor[0] = scale;
        factor[mt] = scale * -MAGIC;
        factor[2 * mt] = scale * vhsum(sum);
    }
}

static void put_plane(activations *a, int64_t slot, int m, int mt, const float *row) {
    if (a->kind == A_INT16) {
        a->factors[slot + m] = put_pairs(row, a->k, A_LIMIT, (int32_t *)a->codes + slot * a->k / 2 + m, mt);
    } else if (a->kind == A_INT8) {
        put_int8(a, slot, m, mt, row);
    } else {
        float *to = (float *)a->codes + slot * a->k + m;
        for (int64_t i = 0; i < a->k; i++) to[i * mt] = row[i];
    }
}

/* what rounding to codes leaves of a row */
static void leave(const activations *a, const float *row, float *rest) {
    int64_t width = a->kind == A_INT16 ? a->k : GROUP;
    float limit = a->kind == A_INT16 ? A_LIMIT : 127.0f;
    for (int64_t from = 0; from < a->k; from += width) {
        float top = row_top(row + from, width);
        vf inverse = vset(top > 0 ? limit / top : 0), scale = vset(a->kind == A_INT16 ? -top / limit : -group_scale(top));
        for (int64_t i = from; i < from + width; i += VL) {
            vf x = vload(row + i);
            vstore(rest + i, vfma(vcvt(vcvti(vmul(x, inverse))), scale, x));
        }
    }
}

/* the last plane's sums become those of all planes */
static void add_sums(const activations *a, int64_t slot, int m, int mt) {
    float *last = plane_of(a, EXACT_PLANES - 1).factors;
    for (int64_t g = 0; g < a->k / GROUP; g++) {
        int64_t at = FACTORS * (slot * (a->k / GROUP) + g * mt) + 2 * mt + m;
        last[at] += plane_of(a, 1).factors[at];
        last[at] += a->factors[at];
    }
}

void act_put(activations *a, int64_t r, const float *row, int64_t n) {
    const tiling *t = &a->tiles;
    int64_t wide = (int64_t)t->extra * (t->base + 1);
    int64_t i = r < wide ? r / (t->base + 1) : t->extra + (r - wide) / t->base;
    int64_t slot = tile_slot(t, i);
    int m = (int)(r - tile_start(t, i)), mt = padded_mt(tile_count(t, i));
    if (n < a->k) { /* zeros up to the padded width */
        float *padded = scratch_thread(TH_PAD, (size_t)a->k * 4);
        memcpy(padded, row, (size_t)n * 4);
        memset(padded + n, 0, (size_t)(a->k - n) * 4);
        row = padded;
    }
    for (int p = 0; p < a->planes; p++) {
        activations plane = plane_of(a, p);
        put_plane(&plane, slot, m, mt, row);
        if (p + 1 == a->planes) break;
        float *rest = scratch_thread(TH_REST, (size_t)a->k * 4);
        leave(a, row, rest);
        row = rest;
    }
    if (in_one_pass(a)) add_sums(a, slot, m, mt);
}

/* ---- one tile of tokens by a pair of row blocks: out[m][32] ---- */
#define OUT_COLUMNS (2 * BLOCK)
#ifdef PW_AVX512
#define HALVES 1
#else
#define HALVES 2
#endif

static void tile_f32(int mt, const float *a, int64_t k, const float *left, const float *right, float *out) {
    for (int part = 0; part < 2; part++) {
        const float *w = part ? right : left;
#define CALL(M) \
    UNROLL for (int v = 0; v < BLOCK; v += VL) product_columns(a, M, 1, w, NULL, BLOCK, v, 0, (int)k, out + part * BLOCK, OUT_COLUMNS, M, 1)
        MT_SWITCH(mt, CALL)
#undef CALL
    }
}

AI void tile_int8_part(const int32_t *a, const float *a_scale, int64_t k, const int8_t *w, int64_t right, const float *w0,
                       const float *w1, float *out, const int second, const int mt) {
    vi acc[MT_MAX][2];
    for (int64_t from = 0; from < k; from += EXACT_K) {
        const int8_t *b = w + from * BLOCK;
        product_pairs(a + from / 2 * mt, mt, 1, &b, right, 1, (int)(min64(k - from, EXACT_K) / 2), acc, mt, 1);
        UNROLL for (int m = 0; m < mt; m++) {
            vf x = vcvt(acc[m][0]), y = vcvt(acc[m][1]);
            float *to = out + m * OUT_COLUMNS;
            if (from > 0) {
                x = vadd(x, vload(to));
                y = vadd(y, vload(to + second));
            }
            vstore(to, x);
            vstore(to + second, y);
        }
    }
    vf s0 = vload(w0), s1 = vload(w1);
    UNROLL for (int m = 0; m < mt; m++) {
        float *to = out + m * OUT_COLUMNS;
        vf s = vset(a_scale[m]);
        vstore(to, vmul(vmul(vload(to), s0), s));
        vstore(to + second, vmul(vmul(vload(to + second), s1), s));
    }
}

static void tile_int8(int mt, const int32_t *a, const float *a_scale, int64_t k, const int8_t *left, const int8_t *right,
                      const float *w0, const float *w1, float *out) {
#ifdef PW_AVX512
#define CALL(M) tile_int8_part(a, a_scale, k, left, right - left, w0, w1, out, BLOCK, M)
    MT_SWITCH(mt, CALL)
#undef CALL
#else
    for (int part = 0; part < 2; part++) {
        const int8_t *w = part ? right : left;
        const float *s = part ? w1 : w0;
#define CALL(M) tile_int8_part(a, a_scale, k, w, BLOCK, s, s + VL, out + part * BLOCK, VL, M)
        MT_SWITCH(mt, CALL)
#undef CALL
    }
#endif
}

AI void tile_q8_part(const int32_t *a, const float *a_scale, int64_t groups, const uint8_t *w, const int half, float *out,
                     const int mt) {
    vf sum[MT_MAX];
    UNROLL for (int m = 0; m < mt; m++) sum[m] = vset(0);
    for (int64_t g = 0; g < groups; g++, w += Q8_BYTES, a += GROUP / 2 * mt) {
        vi acc[MT_MAX];
        if (half == 0) fetch_ahead(w, Q8_BYTES);
        UNROLL for (int m = 0; m < mt; m++) acc[m] = izero();
        for (int s = 0; s < GROUP / 2; s++) {
            vi x = widen8(w + s * 2 * BLOCK + half * BLOCK);
            UNROLL for (int m = 0; m < mt; m++) dp16x1(&acc[m], x, a + s * mt + m);
        }
        vf scale = vhalf((const uint16_t *)(w + 512) + half * VL);
        UNROLL for (int m = 0; m < mt; m++) sum[m] = vfma(vcvt(acc[m]), scale, sum[m]);
    }
    UNROLL for (int m = 0; m < mt; m++) vstore(out + m * OUT_COLUMNS, vmul(sum[m], vset(a_scale[m])));
}

#ifdef PW_VNNI
#define Q4_START iset(MAGIC_BITS)
#else
#define Q4_START izero()
#endif

AI void tile_q4_part(const int32_t *a, const float *factor, int64_t groups, const uint8_t *w, const int half, float *out,
                     const int with_min, const int mt) {
    const vi low = iset8(15);
    vf sum[MT_MAX];
    UNROLL for (int m = 0; m < mt; m++) sum[m] = vset(0);
    for (int64_t g = 0; g < groups; g++, w += with_min ? Q4_1_BYTES : Q4_0_BYTES, a += GROUP / 4 * mt, factor += FACTORS * mt) {
        vi acc[MT_MAX];
        if (half == 0) fetch_ahead(w, with_min ? Q4_1_BYTES : Q4_0_BYTES);
        UNROLL for (int m = 0; m < mt; m++) acc[m] = Q4_START;
        UNROLL for (int s = 0; s < GROUP / 8; s++) {
            vi bytes = iload(w + s * 4 * BLOCK + half * 4 * VL);
            vi x = iand(bytes, low), y = iand(ishr4(bytes), low);
            /* without VNNI eight sums of two products, each at most 15 * 127 * 2, fit 16 bits */
            UNROLL for (int m = 0; m < mt; m++) dp8x1(&acc[m], x, a + s * mt + m);
            UNROLL for (int m = 0; m < mt; m++) dp8x1(&acc[m], y, a + (s + GROUP / 8) * mt + m);
        }
        const uint16_t *factors = (const uint16_t *)(w + 256) + half * VL;
        vf scale = vhalf(factors);
        vf least = with_min ? vhalf(factors + BLOCK) : vmul(scale, vset(-8.0f));
        UNROLL for (int m = 0; m < mt; m++) {
#ifdef PW_VNNI
            vf part = vfma(vfloat(acc[m]), vset(factor[m]), vset(factor[mt + m]));
#else
            vf part = vmul(vcvt(imadd16(acc[m], iset16(1))), vset(factor[m]));
#endif
            sum[m] = vfma(least, vset(factor[2 * mt + m]), vfma(part, scale, sum[m]));
        }
    }
    UNROLL for (int m = 0; m < mt; m++) vstore(out + m * OUT_COLUMNS, sum[m]);
}

/* As above for inputs in EXACT_PLANES planes: weights are unpacked once for all. `mt` rows lie side by side, n are worked on. */
AI void tile_q4_exact_part(const int32_t *a, const float *factor, int64_t plane_bytes, int64_t groups, const uint8_t *w,
                           const int half, float *out, const int with_min, const int mt, const int n) {
    const vi low = iset8(15);
    const char *more = (const char *)a + plane_bytes, *last = more + plane_bytes;
    vf sum[MT_MAX];
    UNROLL for (int m = 0; m < n; m++) sum[m] = vset(0);
    for (int64_t g = 0; g < groups; g++, w += with_min ? Q4_1_BYTES : Q4_0_BYTES, factor += FACTORS * mt) {
        vi acc[EXACT_PLANES][MT_MAX];
        if (half == 0) fetch_ahead(w, with_min ? Q4_1_BYTES : Q4_0_BYTES);
        UNROLL for (int p = 0; p < EXACT_PLANES; p++)
            UNROLL for (int m = 0; m < n; m++) acc[p][m] = p == EXACT_PLANES - 1 ? Q4_START : izero();
        UNROLL for (int s = 0; s < GROUP / 8; s++) {
            vi bytes = iload(w + s * 4 * BLOCK + half * 4 * VL);
            vi x = iand(bytes, low), y = iand(ishr4(bytes), low);
            UNROLL for (int p = 0; p < EXACT_PLANES; p++) {
                const int32_t *codes = p == 0 ? a : (const int32_t *)(p == 1 ? more : last);
                UNROLL for (int m = 0; m < n; m++) dp8x1(&acc[p][m], x, codes + s * mt + m);
                UNROLL for (int m = 0; m < n; m++) dp8x1(&acc[p][m], y, codes + (s + GROUP / 8) * mt + m);
            }
        }
        a += GROUP / 4 * mt, more += GROUP * mt, last += GROUP * mt;
        const uint16_t *halves = (const uint16_t *)(w + 256) + half * VL;
        const float *f0 = factor, *f1 = (const float *)((const char *)f0 + plane_bytes), *f2 = (const float *)((const char *)f1 + plane_bytes);
        vf scale = vhalf(halves);
        vf least = with_min ? vhalf(halves + BLOCK) : vmul(scale, vset(-8.0f));
        UNROLL for (int m = 0; m < n; m++) {
#ifdef PW_VNNI
            vf part = vfma(vfloat(acc[2][m]), vset(f2[m]), vset(f2[mt + m]));
#else
            UNROLL for (int p = 0; p < EXACT_PLANES; p++) acc[p][m] = imadd16(acc[p][m], iset16(1));
            vf part = vmul(vcvt(acc[2][m]), vset(f2[m]));
#endif
            part = vfma(vcvt(acc[0][m]), vset(f0[m]), vfma(vcvt(acc[1][m]), vset(f1[m]), part));
            sum[m] = vfma(least, vset(f2[2 * mt + m]), vfma(part, scale, sum[m]));
        }
    }
    UNROLL for (int m = 0; m < n; m++) vstore(out + m * OUT_COLUMNS, sum[m]);
}

AI void tile_q4_exact_rows(const int32_t *a, const float *factor, int64_t plane_bytes, int64_t groups, const uint8_t *w,
                           const int half, float *out, const int with_min, const int mt) {
    const int n = mt <= EXACT_ROWS ? mt : EXACT_ROWS > 2 ? mt / 2 : EXACT_ROWS;
    int from = 0;
    for (; from + n <= mt; from += n)
        tile_q4_exact_part(a + from, factor + from, plane_bytes, groups, w, half, out + from * OUT_COLUMNS, with_min, mt, n);
    if (mt % n)
        tile_q4_exact_part(a + from, factor + from, plane_bytes, groups, w, half, out + from * OUT_COLUMNS, with_min, mt, mt % n);
}

static void tile_q4_1_exact(int mt, const int32_t *a, const float *factor, int64_t plane_bytes, int64_t groups, const uint8_t *w, float *out) {
#define CALL(M) UNROLL for (int h = 0; h < HALVES; h++) tile_q4_exact_rows(a, factor, plane_bytes, groups, w, h, out + h * VL, 1, M)
    MT_SWITCH(mt, CALL)
#undef CALL
}

static void tile_q4_0_exact(int mt, const int32_t *a, const float *factor, int64_t plane_bytes, int64_t groups, const uint8_t *w, float *out) {
#define CALL(M) UNROLL for (int h = 0; h < HALVES; h++) tile_q4_exact_rows(a, factor, plane_bytes, groups, w, h, out + h * VL, 0, M)
    MT_SWITCH(mt, CALL)
#undef CALL
}

static void tile_q8(int mt, const int32_t *a, const float *a_scale, int64_t groups, const uint8_t *w, float *out) {
#define CALL(M) UNROLL for (int h = 0; h < HALVES; h++) tile_q8_part(a, a_scale, groups, w, h, out + h * VL, M)
    MT_SWITCH(mt, CALL)
#undef CALL
}

static void tile_q4_1(int mt, const int32_t *a, const float *factor, int64_t groups, const uint8_t *w, float *out) {
#define CALL(M) UNROLL for (int h = 0; h < HALVES; h++) tile_q4_part(a, factor, groups, w, h, out + h * VL, 1, M)
    MT_SWITCH(mt, CALL)
#undef CALL
}

static void tile_q4_0(int mt, const int32_t *a, const float *factor, int64_t groups, const uint8_t *w, float *out) {
#define CALL(M) UNROLL for (int h = 0; h < HALVES; h++) tile_q4_part(a, factor, groups, w, h, out + h * VL, 0, M)
    MT_SWITCH(mt, CALL)
#undef CALL
}

static int64_t block_bytes(const pw_linear *w, int64_t k) {
    switch (w->kind) {
    case W_F32: return k * BLOCK * 4;
    case W_INT8: return k * BLOCK;
    case W_Q8: return k / GROUP * Q8_BYTES;
    case W_Q4_1: return k / GROUP * Q4_1_BYTES;
    default: return k / GROUP * Q4_0_BYTES;
    }
}

static void tile_product(const activations *a, const pw_linear *w, int64_t pair, int64_t tile, int mt, float *out) {
    int64_t n_blocks = ceil_div(w->n, BLOCK), one = 2 * pair, two = one + 1 < n_blocks ? one + 1 : one;
    int64_t bytes = block_bytes(w, a->k), slot = tile_slot(&a->tiles, tile), groups = a->k / GROUP;
    const uint8_t *left = w->data + one * bytes, *right = w->data + two * bytes;
    const int32_t *codes = (const int32_t *)((const char *)a->codes + slot * a->k * code_size(a->kind));
    const float *factor = a->factors + (a->kind == A_INT8 ? FACTORS * slot * groups : slot);
    switch (w->kind) {
    case W_F32: tile_f32(mt, (const float *)codes, a->k, (const float *)left, (const float *)right, out); return;
    case W_INT8:
        tile_int8(mt, codes, factor, a->k, (const int8_t *)left, (const int8_t *)right, w->scale + one * BLOCK, w->scale + two * BLOCK, out);
        return;
    case W_Q8:
        tile_q8(mt, codes, factor, groups, left, out);
        tile_q8(mt, codes, factor, groups, right, out + BLOCK);
        return;
    case W_Q4_1:
        for (int i = 0; i < 2; i++, left = right, out += BLOCK) {
            if (in_one_pass(a)) tile_q4_1_exact(mt, codes, factor, a->plane_bytes, groups, left, out);
            else tile_q4_1(mt, codes, factor, groups, left, out);
        }
        return;
    default:
        for (int i = 0; i < 2; i++, left = right, out += BLOCK) {
            if (in_one_pass(a)) tile_q4_0_exact(mt, codes, factor, a->plane_bytes, groups, left, out);
            else tile_q4_0(mt, codes, factor, groups, left, out);
        }
    }
}

static void write_out(const pw_linear *w, int mode, const float *out, int n_rows, int64_t pair, float *y, int64_t ldy) {
    int64_t column = pair * OUT_COLUMNS;
    int n = (int)min64(OUT_COLUMNS, w->n - column);
    for (int m = 0; m < n_rows; m++) {
        const float *x = out + m * OUT_COLUMNS;
        float biased[OUT_COLUMNS];
        if (w->bias != NULL) {
            for (int i = 0; i < n; i++) biased[i] = x[i] + w->bias[column + i];
            x = biased;
        }
        float *to = y + m * ldy + column;
        if (mode == OUT_STORE) {
            for (int i = 0; i < n; i++) to[i] = x[i];
        } else if (mode == OUT_ADD) {
            for (int i = 0; i < n; i++) to[i] += x[i];
        } else {
            to = y + m * ldy + pair * BLOCK;
            for (int i = 0; i < BLOCK; i += VL) vstore(to + i, vmul(gate_vector(vload(x + i), mode == OUT_GELU), vload(x + BLOCK + i)));
        }
    }
}

static void add_plane(const activations *a, int p, const pw_linear *w, int64_t pair, int64_t tile, int n, float *out) {
    float more[MT_MAX * OUT_COLUMNS];
    activations plane = plane_of(a, p);
    tile_product(&plane, w, pair, tile, padded_mt(n), more);
    for (int i = 0; i < n * OUT_COLUMNS; i += VL) vstore(out + i, vadd(vload(out + i), vload(more + i)));
}

void gemm(const activations *a, const pw_linear *w, int mode, float *y, int64_t ldy, int64_t from, int64_t to) {
    int per_super = SUPER_ROWS / MT_MAX;
    float out[MT_MAX * OUT_COLUMNS];
    for (int64_t first = 0; first < a->tiles.n_tiles; first += per_super)
        for (int64_t pair = from; pair < to; pair++)
            for (int64_t tile = first; tile < min64(first + per_super, a->tiles.n_tiles); tile++) {
                int n = tile_count(&a->tiles, tile);
                tile_product(a, w, pair, tile, padded_mt(n), out);
                for (int p = 1; p < a->planes && !in_one_pass(a); p++) add_plane(a, p, w, pair, tile, n, out);
                write_out(w, mode, out, n, pair, y + tile_start(&a->tiles, tile) * ldy, ldy);
            }
}

void gather_row(const pw_linear *w, int64_t row, float *out) {
    int64_t k = round_up(w->k, GROUP), lane = row % BLOCK;
    const uint8_t *b = w->data + row / BLOCK * block_bytes(w, k);
    for (int64_t i = 0; i < w->k; i++) {
        int64_t g = i / GROUP, in = i % GROUP;
        if (w->kind == W_F32) {
            out[i] = ((const float *)b)[i * BLOCK + lane];
        } else if (w->kind == W_INT8) {
            out[i] = (float)((const int8_t *)b)[(i / 2 * BLOCK + lane) * 2 + i % 2] * w->scale[row];
        } else if (w->kind == W_Q8) {
            const uint8_t *at = b + g * Q8_BYTES;
            out[i] = (float)((const int8_t *)at)[(in / 2 * BLOCK + lane) * 2 + in % 2] * half_to_float(((const uint16_t *)(at + 512))[lane]);
        } else {
            const uint8_t *at = b + g * (w->kind == W_Q4_1 ? Q4_1_BYTES : Q4_0_BYTES);
            const uint16_t *factors = (const uint16_t *)(at + 256);
            uint8_t byte = at[((in % 16) / 4 * BLOCK + lane) * 4 + in % 4];
            float scale = half_to_float(factors[lane]), code = (float)(in < 16 ? byte & 15 : byte >> 4);
            out[i] = w->kind == W_Q4_1 ? scale * code + half_to_float(factors[BLOCK + lane]) : scale * (code - 8);
        }
    }
}

/* ---- entry points: rows in, optional norm or gating before, optional residual after ---- */
enum { IN_PLAIN = 0, IN_NORM = 1, IN_SILU = 2, IN_GELU = 3 };

typedef struct {
    const float *x;
    int64_t ldx, rows;
    const pw_linear *w;
    int in_mode, out_mode;
    const float *norm;
    float eps;
    float *y;
    int64_t ldy;
    activations act;
} linear_job;

static void linear_main(int thread, int n_threads, void *arg) {
    linear_job *j = arg;
    int64_t from, to, k = j->w->k;
    share(j->rows, thread, n_threads, &from, &to);
    float *row = scratch_thread(TH_ROW, (size_t)k * 4);
    for (int64_t r = from; r < to; r++) {
        const float *x = j->x + r * j->ldx;
        if (j->in_mode == IN_NORM) norm_row(x, j->norm, j->eps, k, row);
        else if (j->in_mode != IN_PLAIN) gate_row(x, x + k, k, j->in_mode == IN_GELU, row);
        act_put(&j->act, r, j->in_mode == IN_PLAIN ? x : row, k);
    }
    barrier();
    share(block_pairs(j->w), thread, n_threads, &from, &to);
    gemm(&j->act, j->w, j->out_mode, j->y, j->ldy, from, to);
}

static void linear_prepare_main(int thread, int n_threads, void *arg) {
    linear_job *j = arg;
    if (thread == 0) act_init(&j->act, j->w, j->rows, scratch_shared(SH_ACT, act_bytes(j->w, j->rows)));
    barrier();
    linear_main(thread, n_threads, arg);
}

EXPORT void pw_linear_forward(const float *x, int64_t ldx, int64_t rows, const pw_linear *w, int in_mode, const float *norm,
                              float eps, int out_mode, float *y, int64_t ldy, int n_threads) {
    linear_job j = {x, ldx, rows, w, in_mode, out_mode, norm, eps, y, ldy, {0}};
    if (rows > 0) run_parallel(n_threads, linear_prepare_main, &j);
}

EXPORT void pw_gather(const pw_linear *w, const int64_t *rows, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i++) gather_row(w, rows[i], out + i * w->k);
}
