/* Work on single rows: norm, gating, rope. */
#ifndef PW_ROWS_H
#define PW_ROWS_H

#include "common.h"

/* silu(x), or the tanh form of gelu(x): both are x times a sigmoid */
AI vf gate_vector(vf x, int gelu) {
    vf u = x;
    if (gelu) {
        vf cube = vfma(vmul(vmul(x, x), x), vset(0.044715f), x);
        u = vmul(cube, vset(1.5957691216057308f));
    }
    return vdiv(x, vadd(vset(1.0f), vexp(vsub(vset(0), u))));
}

/* the largest |x|, as the integers that its bits are: a NaN is above all numbers, and comes out */
AI float row_top(const float *x, int64_t n) {
    vf most = vset(0);
    int64_t i = 0;
    for (; i + VL <= n; i += VL) most = vumax(most, vabs(vload(x + i)));
    if (i < n) {
        float rest[VL] = {0};
        memcpy(rest, x + i, (size_t)(n - i) * sizeof(float));
        most = vumax(most, vabs(vload(rest)));
    }
    return vhumax(most);
}

/* n numbers as codes of 16 bits up to `limit`, in pairs `stride` apart; returns their scale. n: a multiple of 16. */
AI float put_pairs(const float *x, int64_t n, float limit, int32_t *to, int64_t stride) {
    float top = row_top(x, n), inverse = top > 0 ? limit / top : 0;
    for (int64_t i = 0; i < n; i += VL) {
        int16_t codes[VL];
        int32_t pairs[VL / 2];
        store16(codes, vcvti(vmul(vload(x + i), vset(inverse))));
        memcpy(pairs, codes, sizeof(codes));
        for (int j = 0; j < VL / 2; j++) to[(i / 2 + j) * stride] = pairs[j];
    }
    return top / limit;
}

#endif
