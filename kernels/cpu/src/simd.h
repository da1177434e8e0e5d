/* One vector width per build: PW_AVX512 (16 lanes) or AVX2 (8 lanes), with or without VNNI. */
#ifndef PW_SIMD_H
#define PW_SIMD_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#define AI static inline __attribute__((always_inline))

#ifdef PW_AVX512

#define VL 16
typedef __m512 vf;
typedef __m512i vi;

AI vf vload(const float *p) { return _mm512_loadu_ps(p); }
AI void vstore(float *p, vf x) { _mm512_storeu_ps(p, x); }
AI vf vset(float x) { return _mm512_set1_ps(x); }
AI vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
AI vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
AI vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
AI vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
AI vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
AI vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
AI vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
AI vf vfnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
AI vf vround(vf a) { return _mm512_roundscale_ps(a, 0); }
AI float vhmax(vf a) { return _mm512_reduce_max_ps(a); }
AI float vhsum(vf a) { return _mm512_reduce_add_ps(a); }
AI vf vabs(vf a) { return _mm512_abs_ps(a); }
AI vf vhalf(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
AI vf vbf16(const uint16_t *p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
AI vf vfloat(vi a) { return _mm512_castsi512_ps(a); }
AI vf vcvt(vi a) { return _mm512_cvtepi32_ps(a); }
AI vi vcvti(vf a) { return _mm512_cvtps_epi32(a); }
AI vf vpow2(vf n) { return _mm512_scalef_ps(_mm512_set1_ps(1.0f), n); }
AI vf vkeep(vf x, vf other, int base, int lo, int hi) {
    const vi iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    vi at = _mm512_add_epi32(_mm512_set1_epi32(base), iota);
    __mmask16 in = _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(lo)) &
                   _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32(hi));
    return _mm512_mask_blend_ps(in, other, x);
}

AI vf vkeep_rows(vf x, vf other, int at, vi lo, vi hi) {
    vi here = _mm512_set1_epi32(at);
    return _mm512_mask_blend_ps(_mm512_cmple_epi32_mask(lo, here) & _mm512_cmpgt_epi32_mask(hi, here), other, x);
}
AI vf vumax(vf a, vf b) { return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b))); }
AI float vhumax(vf a) {
    union { uint32_t u; float f; } x = {.u = _mm512_reduce_max_epu32(_mm512_castps_si512(a))};
    return x.f;
}
AI vf vseen(vf x, vf other, vf max) { return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(max, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ), other); }
AI vf vsign(vf x, vf sign) { return _mm512_or_ps(x, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f))); }
AI vf vpositive(vf x, vf y) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ), y); }

AI vi izero(void) { return _mm512_setzero_si512(); }
AI vi iset(int32_t x) { return _mm512_set1_epi32(x); }
AI vi iload(const void *p) { return _mm512_loadu_si512(p); }
AI void istore(void *p, vi a) { _mm512_storeu_si512(p, a); }
AI vi iunpack32lo(vi a, vi b) { return _mm512_unpacklo_epi32(a, b); }
AI vi iunpack32hi(vi a, vi b) { return _mm512_unpackhi_epi32(a, b); }
AI vi iunpack64lo(vi a, vi b) { return _mm512_unpacklo_epi64(a, b); }
AI vi iunpack64hi(vi a, vi b) { return _mm512_unpackhi_epi64(a, b); }
#define ishl(a, n) _mm512_slli_epi32(a, n)
AI vi ior(vi a, vi b) { return _mm512_or_si512(a, b); }
AI vi iadd(vi a, vi b) { return _mm512_add_epi32(a, b); }
AI vi iand(vi a, vi b) { return _mm512_and_si512(a, b); }
AI vi ishr4(vi a) { return _mm512_srli_epi16(a, 4); }
AI vi imadd16(vi a, vi b) { return _mm512_madd_epi16(a, b); }
AI vi iset8(int8_t x) { return _mm512_set1_epi8(x); }
AI vi iset16(int16_t x) { return _mm512_set1_epi16(x); }
AI vi widen8(const void *p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p)); }
AI void store16(int16_t *p, vi a) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtsepi32_epi16(a)); }
AI void store8(int8_t *p, vi a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(a)); }

#else /* AVX2 */

#define VL 8
typedef __m256 vf;
typedef __m256i vi;

AI vf vload(const float *p) { return _mm256_loadu_ps(p); }
AI void vstore(float *p, vf x) { _mm256_storeu_ps(p, x); }
AI vf vset(float x) { return _mm256_set1_ps(x); }
AI vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
AI vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
AI vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
AI vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
AI vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
AI vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
AI vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
AI vf vfnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
AI vf vround(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
AI float vhmax(vf a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
AI float vhsum(vf a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
AI vf vabs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
AI vf vhalf(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
AI vf vbf16(const uint16_t *p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
AI vf vfloat(vi a) { return _mm256_castsi256_ps(a); }
AI vf vcvt(vi a) { return _mm256_cvtepi32_ps(a); }
AI vi vcvti(vf a) { return _mm256_cvtps_epi32(a); }
AI vf vpow2(vf n) {
    vi e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
AI vf vkeep(vf x, vf other, int base, int lo, int hi) {
    const vi iota = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    vi at = _mm256_add_epi32(_mm256_set1_epi32(base), iota);
    vi out = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), at),
                             _mm256_cmpgt_epi32(at, _mm256_set1_epi32(hi - 1)));
    return _mm256_blendv_ps(x, other, _mm256_castsi256_ps(out));
}

AI vf vkeep_rows(vf x, vf other, int at, vi lo, vi hi) {
    vi here = _mm256_set1_epi32(at);
    vi in = _mm256_andnot_si256(_mm256_cmpgt_epi32(lo, here), _mm256_cmpgt_epi32(hi, here));
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(in));
}
AI vf vumax(vf a, vf b) { return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(b))); }
AI float vhumax(vf a) {
    __m128i x = _mm_castps_si128(_mm256_castps256_ps128(a)), y = _mm_castps_si128(_mm256_extractf128_ps(a, 1));
    x = _mm_max_epu32(x, y);
    x = _mm_max_epu32(x, _mm_unpackhi_epi64(x, x));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epu32(x, _mm_shuffle_epi32(x, 1))));
}
AI vf vseen(vf x, vf other, vf max) { return _mm256_blendv_ps(x, other, _mm256_cmp_ps(max, _mm256_set1_ps(-INFINITY), _CMP_EQ_OQ)); }
AI vf vsign(vf x, vf sign) { return _mm256_or_ps(x, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f))); }
AI vf vpositive(vf x, vf y) { return _mm256_and_ps(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ), y); }

AI vi izero(void) { return _mm256_setzero_si256(); }
AI vi iset(int32_t x) { return _mm256_set1_epi32(x); }
AI vi iload(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
AI void istore(void *p, vi a) { _mm256_storeu_si256((__m256i *)p, a); }
AI vi iunpack32lo(vi a, vi b) { return _mm256_unpacklo_epi32(a, b); }
AI vi iunpack32hi(vi a, vi b) { return _mm256_unpackhi_epi32(a, b); }
AI vi iunpack64lo(vi a, vi b) { return _mm256_unpacklo_epi64(a, b); }
AI vi iunpack64hi(vi a, vi b) { return _mm256_unpackhi_epi64(a, b); }
#define ishl(a, n) _mm256_slli_epi32(a, n)
AI vi ior(vi a, vi b) { return _mm256_or_si256(a, b); }
AI vi iadd(vi a, vi b) { return _mm256_add_epi32(a, b); }
AI vi iand(vi a, vi b) { return _mm256_and_si256(a, b); }
AI vi ishr4(vi a) { return _mm256_srli_epi16(a, 4); }
AI vi imadd16(vi a, vi b) { return _mm256_madd_epi16(a, b); }
AI vi iset8(int8_t x) { return _mm256_set1_epi8(x); }
AI vi iset16(int16_t x) { return _mm256_set1_epi16(x); }
AI vi widen8(const void *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }
AI void store16(int16_t *p, vi a) {
    _mm_storeu_si128((__m128i *)p,
                     _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
}
AI void store8(int8_t *p, vi a) {
    __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(w, w));
}

#endif

/* Multiply-adds with a number broadcast from memory. They are in assembly because the compiler, left to order
 * the parts itself, loads all broadcasts first and spills the sums. */
#if defined(PW_AVX512)
#define VEX ""
#elif defined(PW_VNNI)
#define VEX "%{vex%} "
#endif

AI void fma1(vf *sum, vf x, const float *y) {
#ifdef PW_AVX512
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(*sum) : "v"(x), "m"(*y));
#else
    vf t;
    __asm__("vbroadcastss %3, %1\n\tvfmadd231ps %1, %2, %0" : "+v"(*sum), "=&v"(t) : "v"(x), "m"(*y));
#endif
}
AI void fma2(vf *s0, vf *s1, vf x0, vf x1, const float *y) {
    vf t;
    __asm__("vbroadcastss %5, %2\n\tvfmadd231ps %2, %3, %0\n\tvfmadd231ps %2, %4, %1"
            : "+v"(*s0), "+v"(*s1), "=&v"(t)
            : "v"(x0), "v"(x1), "m"(*y));
}

/* sums of pairs: 16-bit y times 16-bit w */
AI void dp16x1(vi *sum, vi w, const int32_t *y) {
#if defined(PW_VNNI) && defined(PW_AVX512)
    __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(*sum) : "v"(w), "m"(*y));
#elif defined(PW_VNNI)
    vi t;
    __asm__("vpbroadcastd %3, %1\n\t" VEX "vpdpwssd %1, %2, %0" : "+v"(*sum), "=&v"(t) : "v"(w), "m"(*y));
#else
    vi t;
    __asm__("vpbroadcastd %3, %1\n\tvpmaddwd %2, %1, %1\n\tvpaddd %1, %0, %0" : "+v"(*sum), "=&v"(t) : "v"(w), "m"(*y));
#endif
}
AI void dp16x2(vi *s0, vi *s1, vi w0, vi w1, const int32_t *y) {
    vi t;
#ifdef PW_VNNI
    __asm__("vpbroadcastd %5, %2\n\t" VEX "vpdpwssd %2, %3, %0\n\t" VEX "vpdpwssd %2, %4, %1"
            : "+v"(*s0), "+v"(*s1), "=&v"(t)
            : "v"(w0), "v"(w1), "m"(*y));
#else
    vi u;
    __asm__("vpbroadcastd %6, %2\n\tvpmaddwd %4, %2, %3\n\tvpmaddwd %5, %2, %2\n\tvpaddd %3, %0, %0\n\tvpaddd %2, %1, %1"
            : "+v"(*s0), "+v"(*s1), "=&v"(t), "=&v"(u)
            : "v"(w0), "v"(w1), "m"(*y));
#endif
}
/* unsigned 4-bit w times signed 8-bit y: sums of four in 32 bits with VNNI, else of two in 16 bits */
AI void dp8x1(vi *sum, vi w, const int32_t *y) {
#if defined(PW_VNNI) && defined(PW_AVX512)
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(*sum) : "v"(w), "m"(*y));
#elif defined(PW_VNNI)
    vi t;
    __asm__("vpbroadcastd %3, %1\n\t" VEX "vpdpbusd %1, %2, %0" : "+v"(*sum), "=&v"(t) : "v"(w), "m"(*y));
#else
    vi t;
    __asm__("vpbroadcastd %3, %1\n\tvpmaddubsw %1, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(*sum), "=&v"(t) : "v"(w), "m"(*y));
#endif
}

/* exp for x <= 88: degree-6 polynomial after Cody-Waite reduction; exp(0) is exactly 1. */
AI vf vexp(vf x) {
    x = vmin(vmax(x, vset(-87.0f)), vset(88.0f));
    vf n = vround(vmul(x, vset(1.44269504088896341f)));
    vf r = vfnma(n, vset(0.693359375f), x);
    r = vfnma(n, vset(-2.12194440e-4f), r);
    vf p = vset(1.9875691500e-4f);
    p = vfma(p, r, vset(1.3981999507e-3f));
    p = vfma(p, r, vset(8.3334519073e-3f));
    p = vfma(p, r, vset(4.1665795894e-2f));
    p = vfma(p, r, vset(1.6666665459e-1f));
    p = vfma(p, r, vset(5.0000001201e-1f));
    p = vfma(vmul(r, r), p, vadd(r, vset(1.0f)));
    return vmul(p, vpow2(n));
}

/* 2^x for x <= 0, off by 2e-7 of it at most; 2^0 is exactly 1 and a NaN stays one (the order of max is why) */
AI vf vexp2(vf x) {
    x = vmax(vset(-126.0f), x);
    vf n = vround(x), r = vsub(x, n);
    vf p = vset(1.326472731307149e-3f);
    p = vfma(p, r, vset(9.671512991189957e-3f));
    p = vfma(p, r, vset(5.550733581185341e-2f));
    p = vfma(p, r, vset(2.4022242426872253e-1f));
    p = vfma(p, r, vset(6.931470036506653e-1f));
    return vmul(vfma(p, r, vset(1.0f)), vpow2(n));
}

AI float exp2_one(float x) {
    float lanes[VL];
    vstore(lanes, vexp2(vset(x)));
    return lanes[0];
}

AI float half_to_float(uint16_t h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h))); }
AI uint16_t float_to_half(float x) {
    return (uint16_t)_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT));
}
AI float bf16_to_float(uint16_t b) {
    union { uint32_t u; float f; } x = {.u = (uint32_t)b << 16};
    return x.f;
}
AI uint16_t float_to_bf16(float f) {
    union { float f; uint32_t u; } x = {.f = f};
    if ((x.u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((x.u >> 16) | 0x40);
    return (uint16_t)((x.u + 0x7fffu + ((x.u >> 16) & 1)) >> 16);
}

#endif
