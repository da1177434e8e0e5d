/* Norm, gating, rope, and the write into the cache. */
#include "rows.h"

void norm_row(const float *x, const float *w, float eps, int64_t n, float *y) {
    vf sum = vset(0);
    int64_t i = 0;
    for (; i + VL <= n; i += VL) sum = vfma(vload(x + i), vload(x + i), sum);
    float total = vhsum(sum);
    for (; i < n; i++) total += x[i] * x[i];
    float scale = 1.0f / sqrtf(total / (float)n + eps);
    for (i = 0; i + VL <= n; i += VL) vstore(y + i, vmul(vmul(vload(x + i), vset(scale)), vload(w + i)));
    for (; i < n; i++) y[i] = x[i] * scale * w[i];
}

void gate_row(const float *gate, const float *up, int64_t n, int gelu, float *y) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) vstore(y + i, vmul(gate_vector(vload(gate + i), gelu), vload(up + i)));
    if (i == n) return;
    float g[VL] = {0}, u[VL] = {0}, out[VL];
    memcpy(g, gate + i, (size_t)(n - i) * 4);
    memcpy(u, up + i, (size_t)(n - i) * 4);
    vstore(out, vmul(gate_vector(vload(g), gelu), vload(u)));
    memcpy(y + i, out, (size_t)(n - i) * 4);
}

/* rotates the two halves of the first `rot` numbers against each other */
void rope_row(float *x, const float *cos, const float *sin, int64_t rot) {
    int64_t half = rot / 2, i = 0;
    for (; i + VL <= half; i += VL) {
        vf a = vload(x + i), b = vload(x + half + i), c = vload(cos + i), s = vload(sin + i);
        vstore(x + i, vfnma(b, s, vmul(a, c)));
        vstore(x + half + i, vfma(a, s, vmul(b, c)));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = fmaf(-b, sin[i], a * cos[i]);
        x[half + i] = fmaf(a, sin[i], b * cos[i]);
    }
}

/* codes of -127..127, zeros up to the padded width, and their scale in half precision */
static uint16_t make_codes(const float *x, int64_t n, int8_t *codes) {
    float size = row_top(x, n) / 127.0f;
    uint16_t half = float_to_half(size < 6e-8f ? 6e-8f : size > 65504.0f ? 65504.0f : size);
    vf inverse = vset(1.0f / half_to_float(half));
    for (int64_t i = 0; i < n; i += VL) {
        float part[VL] = {0};
        memcpy(part, x + i, (size_t)min64(VL, n - i) * sizeof(float));
        vf scaled = vmul(vload(part), inverse);
        store8(codes + i, vcvti(vmin(vmax(scaled, vset(-127.0f)), vset(127.0f))));
    }
    return half;
}

static void put_codes(const pw_kv *kv, int64_t page, int64_t offset, int head, const float *k, const float *v) {
    int64_t k_wide = int8_width(kv->dk), v_wide = int8_width(kv->dv), lane = offset % BLOCK;
    int64_t at = head * (int64_t)kv->page_size + offset, group = at - lane;
    int8_t codes[max64(k_wide, v_wide) + VL];
    memset(codes, 0, sizeof(codes));
    kv->k_scale[page * kv->k_scale_page + at] = make_codes(k, kv->dk, codes);
    int8_t *to = (int8_t *)kv->k + page * kv->k_page + group * k_wide + lane * 2;
    for (int64_t d = 0; d < k_wide; d += 2) memcpy(to + d * BLOCK, codes + d, 2);
    memset(codes, 0, sizeof(codes));
    kv->v_scale[page * kv->v_scale_page + at] = make_codes(v, kv->dv, codes);
    to = (int8_t *)kv->v + page * kv->v_page + group * v_wide + lane / 2 * 2 * BLOCK + lane % 2;
    for (int64_t d = 0; d < v_wide; d++) to[d / BLOCK * BLOCK * BLOCK + d % BLOCK * 2] = codes[d];
}

static void put_numbers(int format, void *base, int64_t at, const float *x, int64_t n) {
    if (format == KV_F32) {
        memcpy((float *)base + at, x, (size_t)n * 4);
        return;
    }
    for (int64_t i = 0; i < n; i++) ((uint16_t *)base)[at + i] = float_to_bf16(x[i]);
}

void kv_put(const pw_kv *kv, int64_t page, int64_t offset, int head, const float *k, const float *v) {
    if (kv->format == KV_INT8) {
        put_codes(kv, page, offset, head, k, v);
        return;
    }
    put_numbers(kv->format, kv->k, page * kv->k_page + offset * kv->k_token + head * kv->k_head, k, kv->dk);
    if (kv->has_v) put_numbers(kv->format, kv->v, page * kv->v_page + offset * kv->v_token + head * kv->v_head, v, kv->dv);
}

EXPORT void pw_rms_norm(float *x, int64_t ldx, const float *add, int64_t ld_add, const float *w, float eps, int64_t rows, int64_t n, float *y) {
    for (int64_t r = 0; r < rows; r++) {
        float *row = x + r * ldx;
        if (add != NULL)
            for (int64_t i = 0; i < n; i++) row[i] += add[r * ld_add + i];
        norm_row(row, w, eps, n, y + r * n);
    }
}

EXPORT void pw_gate(const float *x, int64_t ldx, int64_t rows, int64_t n, int gelu, float *y) {
    for (int64_t r = 0; r < rows; r++) gate_row(x + r * ldx, x + r * ldx + n, n, gelu, y + r * n);
}

typedef struct {
    float *q, *k;
    const float *v, *cos, *sin;
    int64_t ldq, ldk, ldv, rows, rot, n_q;
    const int64_t *positions, *slots;
    const pw_kv *kv;
} rope_job;

static void rope_main(int thread, int n_threads, void *arg) {
    rope_job *j = arg;
    const pw_kv *kv = j->kv;
    int64_t from, to;
    share(j->rows, thread, n_threads, &from, &to);
    for (int64_t r = from; r < to; r++) {
        int64_t at = j->rot > 0 ? j->positions[r] * (j->rot / 2) : 0;
        const float *cos = j->cos + at, *sin = j->sin + at;
        for (int64_t h = 0; h < j->n_q; h++) rope_row(j->q + r * j->ldq + h * kv->dk, cos, sin, j->rot);
        for (int h = 0; h < kv->n_heads; h++) {
            float *k = j->k + r * j->ldk + (int64_t)h * kv->dk;
            rope_row(k, cos, sin, j->rot);
            if (j->slots[r] >= 0)
                kv_put(kv, j->slots[r] / kv->page_size, j->slots[r] % kv->page_size, h, k, j->v + r * j->ldv + (int64_t)h * kv->dv);
        }
    }
}

/* rot 0: no rope, the write alone */
EXPORT void pw_rope_write(float *q, int64_t ldq, int64_t n_q, float *k, int64_t ldk, const float *v, int64_t ldv, int64_t rows,
                          const float *cos, const float *sin, int64_t rot, const int64_t *positions, const int64_t *slots,
                          const pw_kv *kv, int n_threads) {
    rope_job j = {q, k, v, cos, sin, ldq, ldk, ldv, rows, rot, n_q, positions, slots, kv};
    run_parallel(n_threads, rope_main, &j);
}
