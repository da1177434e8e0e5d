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

#endif
