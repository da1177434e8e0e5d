/* The two inner products that everything else is made of: fp32, and 16-bit by 8-bit pairs. */
#ifndef PW_PRODUCTS_H
#define PW_PRODUCTS_H

#include "common.h"

/* c[m][n] = sum over k of a[k * sk + m * sm] * b[k][n]; row k of b is at rows[k], or without rows at b + k * ldb */
AI void product_columns(const float *a, int64_t sk, const int64_t sm, const float *b, const float *const *rows,
                        int64_t ldb, int n, int from, int to, float *c, int64_t ldc, const int mt, const int nv) {
    vf acc[MT_MAX][4];
    UNROLL for (int m = 0; m < mt; m++) UNROLL for (int v = 0; v < nv; v++) acc[m][v] = vset(0);
    for (int k = from; k < to; k++) {
        vf x[4];
        const float *row = (rows ? rows[k] : b + k * ldb) + n;
        UNROLL for (int v = 0; v < nv; v++) x[v] = vload(row + v * VL);
        UNROLL for (int m = 0; m < mt; m++) {
            const float *y = a + k * sk + m * sm;
            if (nv == 1) fma1(&acc[m][0], x[0], y);
            UNROLL for (int v = 0; v + 2 <= nv; v += 2) fma2(&acc[m][v], &acc[m][v + 1], x[v], x[v + 1], y);
        }
    }
    UNROLL for (int m = 0; m < mt; m++) UNROLL for (int v = 0; v < nv; v++) vstore(c + m * ldc + n + v * VL, acc[m][v]);
}

AI void product(const float *a, int64_t sk, const int64_t sm, const float *b, const float *const *rows, int64_t ldb, int from,
                int to, float *c, int64_t ldc, int n_from, int n_to, const int mt) {
    int n = n_from;
    if (mt <= MT_MAX / 4)
        for (; n + 4 * VL <= n_to; n += 4 * VL) product_columns(a, sk, sm, b, rows, ldb, n, from, to, c, ldc, mt, 4);
    for (; n < n_to; n += 2 * VL) product_columns(a, sk, sm, b, rows, ldb, n, from, to, c, ldc, mt, 2);
}

#define AHEAD 2048 /* bytes */
/* weights are one stream; the hardware alone does not run far enough ahead of it while it is worked on */
AI void fetch_ahead(const void *p, const int bytes) {
    for (int i = 0; i < bytes; i += 64) _mm_prefetch((const char *)p + AHEAD + i, _MM_HINT_T0);
}

/* as above on pairs of 16-bit and 8-bit numbers; b comes in groups of `steps` pairs, 2 * VL columns wide.
 * `stream`: what follows b in memory is read next. */
AI void product_pairs(const int32_t *a, int64_t sk, const int64_t sm, const int8_t *const *b, const int64_t right,
                      int n_groups, int steps, vi acc[MT_MAX][2], const int mt, const int stream) {
    const int unroll = mt == 1 ? 4 : mt <= MT_MAX / 4 ? 2 : 1;
    vi sums[4][MT_MAX][2];
    UNROLL for (int u = 0; u < unroll; u++) UNROLL for (int m = 0; m < mt; m++) {
        sums[u][m][0] = izero();
        sums[u][m][1] = izero();
    }
    for (int g = 0; g < n_groups; g++) {
        const int8_t *left = b[g];
        const int32_t *x = a + (int64_t)g * steps * sk;
        for (int s = 0; s < steps; s += unroll) UNROLL for (int u = 0; u < unroll; u++) {
            if (stream && u % 2 == 0) {
                fetch_ahead(left + (s + u) * 2 * BLOCK, 64);
                if (VL == BLOCK) fetch_ahead(left + right + (s + u) * 2 * BLOCK, 64);
            }
            vi w0 = widen8(left + (s + u) * 2 * BLOCK), w1 = widen8(left + right + (s + u) * 2 * BLOCK);
            UNROLL for (int m = 0; m < mt; m++) dp16x2(&sums[u][m][0], &sums[u][m][1], w0, w1, x + (s + u) * sk + m * sm);
        }
    }
    UNROLL for (int m = 0; m < mt; m++) UNROLL for (int v = 0; v < 2; v++)
        acc[m][v] = unroll == 4   ? iadd(iadd(sums[0][m][v], sums[1][m][v]), iadd(sums[2][m][v], sums[3][m][v]))
                    : unroll == 2 ? iadd(sums[0][m][v], sums[1][m][v])
                                  : sums[0][m][v];
}

/* c[j] = sum over k of the rows' column k times b[k][n + j], lanes being rows: column k of a is at a + k * width */
#define COLUMNS (VL / 2)
AI void row_product(const float *a, int64_t width, const float *b, const float *const *rows, int64_t ldb, int64_t n, int from,
                    int to, vf acc[COLUMNS][2], const int nv) {
    UNROLL for (int j = 0; j < COLUMNS; j++) acc[j][0] = acc[j][1] = vset(0);
    for (int k = from; k < to; k++) {
        const float *y = (rows ? rows[k] : b + k * ldb) + n;
        vf x0 = vload(a + k * width);
        if (nv == 1) UNROLL for (int j = 0; j < COLUMNS; j++) fma1(&acc[j][0], x0, y + j);
        if (nv == 1) continue;
        vf x1 = vload(a + k * width + VL);
        UNROLL for (int j = 0; j < COLUMNS; j++) fma2(&acc[j][0], &acc[j][1], x0, x1, y + j);
    }
}

AI void row_product_pairs(const int32_t *a, int64_t width, const int32_t *b, int64_t ldb, int from, int to,
                          vi acc[COLUMNS][2], const int nv) {
    UNROLL for (int j = 0; j < COLUMNS; j++) acc[j][0] = acc[j][1] = izero();
    for (int k = from; k < to; k++) {
        const int32_t *y = b + k * ldb;
        vi x0 = iload(a + k * width);
        if (nv == 1) UNROLL for (int j = 0; j < COLUMNS; j++) dp16x1(&acc[j][0], x0, y + j);
        if (nv == 1) continue;
        vi x1 = iload(a + k * width + VL);
        UNROLL for (int j = 0; j < COLUMNS; j++) dp16x2(&acc[j][0], &acc[j][1], x0, x1, y + j);
    }
}

#endif
