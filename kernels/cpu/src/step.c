/* A whole step of a llama-like decoder in one parallel region: every layer, the last norm, and the wanted logits. */
#include "rows.h"

typedef struct {
    pw_linear qkv, o, gate_up, down; /* gate_up: blocks of gate and up rows in turn */
    const float *attn_norm, *ffn_norm;
    const float *post_attn_norm, *post_ffn_norm, *q_norm, *k_norm; /* or NULL */
    const float *cos, *sin;                                        /* [positions, rot / 2] */
    const float *sinks;                                            /* or NULL */
    pw_kv kv;
    int32_t n_q_heads, rot, window, group, plan, gate; /* gate: OUT_SILU or OUT_GELU */
    float scale, softcap;
} pw_layer;

typedef struct {
    int32_t n_layers, hidden;
    float eps, embed_scale, logit_softcap;
    const pw_layer *layers;
    const float *final_norm;
    pw_linear embed, head;
} pw_model;

typedef struct {
    const int32_t *page_table;
    int64_t table_stride;
    const int32_t *kv_start;
} pw_group;

typedef struct {
    int32_t n_tokens, n_seq, n_rows;
    const int64_t *ids;      /* [n_tokens] */
    const float *embeddings; /* [n_tokens, hidden] instead of ids, or NULL */
    const int32_t *query_start, *kv_len;
    const pw_group *groups;
    const int64_t *rows; /* [n_rows], tokens whose logits are wanted */
    float *logits;       /* [n_rows, vocabulary] */
    float *hidden;       /* [n_tokens, hidden] after the last norm, or NULL */
} pw_batch;

typedef struct {
    const pw_model *model;
    const pw_batch *batch;
    float *x, *qkv, *attn, *ffn, *out;
    int32_t *seq, *position; /* of each token */
    void *act_memory;
    size_t act_bytes;
    attn_plan *plans[MAX_PLANS];
} step_job;

typedef struct {
    step_job *job;
    int thread, n_threads;
} worker;

static pw_attn attention_of(const step_job *j, const pw_layer *l) {
    const pw_group *g = &j->batch->groups[l->group];
    return (pw_attn){.n_seq = j->batch->n_seq, .n_q_heads = l->n_q_heads, .window = l->window, .scale = l->scale,
                     .softcap = l->softcap, .page_table = g->page_table, .table_stride = g->table_stride,
                     .query_start = j->batch->query_start, .kv_len = j->batch->kv_len, .kv_start = g->kv_start,
                     .sinks = l->sinks};
}

static void prepare(step_job *j, int n_threads) {
    const pw_model *m = j->model;
    const pw_batch *b = j->batch;
    size_t n = (size_t)b->n_tokens, qkv = 0, attn = 0, ffn = 0;
    int n_plans = 0;
    j->act_bytes = act_bytes(&m->head, b->n_rows);
    for (int i = 0; i < m->n_layers; i++) {
        const pw_layer *l = &m->layers[i];
        const pw_linear *all[] = {&l->qkv, &l->o, &l->gate_up, &l->down};
        for (int w = 0; w < 4; w++) {
            size_t bytes = act_bytes(all[w], b->n_tokens);
            j->act_bytes = bytes > j->act_bytes ? bytes : j->act_bytes;
        }
        qkv = (size_t)l->qkv.n > qkv ? (size_t)l->qkv.n : qkv;
        attn = (size_t)l->o.k > attn ? (size_t)l->o.k : attn;
        ffn = (size_t)l->down.k > ffn ? (size_t)l->down.k : ffn;
        if (l->plan == n_plans) {
            pw_attn a = attention_of(j, l);
            j->plans[n_plans] = plan_attention(&a, l->kv.n_heads, l->kv.dv, n_threads, SH_COUNT + 2 * n_plans);
            n_plans++;
        }
    }
    j->x = scratch_shared(SH_X, n * (size_t)m->hidden * 4);
    j->out = scratch_shared(SH_OUT, n * (size_t)m->hidden * 4);
    j->qkv = scratch_shared(SH_QKV, n * qkv * 4);
    j->attn = scratch_shared(SH_ATTN, n * attn * 4);
    j->ffn = scratch_shared(SH_FFN, n * ffn * 4);
    j->act_memory = scratch_shared(SH_ACT, j->act_bytes);
    j->seq = scratch_shared(SH_TOKENS, n * 8);
    j->position = j->seq + n;
    for (int s = 0; s < b->n_seq; s++)
        for (int t = b->query_start[s]; t < b->query_start[s + 1]; t++) {
            j->seq[t] = s;
            j->position[t] = b->kv_len[s] - b->query_start[s + 1] + t;
        }
}

/* codes of rows for the product that comes next. One row: every thread makes its own, which saves a barrier. */
static activations encode(const worker *w, const float *x, int64_t width, const float *norm, const int64_t *pick, int64_t rows,
                          const pw_linear *next) {
    activations a;
    int64_t from = 0, to = rows;
    int alone = rows == 1;
    void *memory = w->job->act_memory;
    if (alone) memory = scratch_thread(TH_ACT, act_bytes(next, rows));
    else share(rows, w->thread, w->n_threads, &from, &to);
    act_init(&a, next, rows, memory);
    float *row = scratch_thread(TH_ROW, (size_t)width * 4);
    for (int64_t r = from; r < to; r++) {
        const float *source = x + (pick ? pick[r] : r) * width;
        if (norm) norm_row(source, norm, w->job->model->eps, width, row);
        act_put(&a, r, norm ? row : source, width);
    }
    if (!alone) barrier();
    return a;
}

static void multiply(const worker *w, const activations *a, const pw_linear *weight, int mode, float *y, int64_t ldy) {
    int64_t from, to;
    share(block_pairs(weight), w->thread, w->n_threads, &from, &to);
    gemm(a, weight, mode, y, ldy, from, to);
    barrier();
}

/* the product added to x, through one more norm where the layer has one */
static void multiply_add(const worker *w, const activations *a, const pw_linear *weight, const float *post_norm) {
    step_job *j = w->job;
    int64_t width = j->model->hidden, from, to;
    if (post_norm == NULL) {
        multiply(w, a, weight, OUT_ADD, j->x, width);
        return;
    }
    multiply(w, a, weight, OUT_STORE, j->out, width);
    share(j->batch->n_tokens, w->thread, w->n_threads, &from, &to);
    float *row = scratch_thread(TH_ROW, (size_t)width * 4);
    for (int64_t t = from; t < to; t++) {
        norm_row(j->out + t * width, post_norm, j->model->eps, width, row);
        for (int64_t i = 0; i < width; i++) j->x[t * width + i] += row[i];
    }
    barrier();
}

static void rope_and_write(const worker *w, const pw_layer *l) {
    step_job *j = w->job;
    const pw_group *g = &j->batch->groups[l->group];
    const pw_kv *kv = &l->kv;
    int64_t heads = l->n_q_heads + kv->n_heads, from, to, ld = l->qkv.n, k_at = (int64_t)l->n_q_heads * kv->dk;
    share(j->batch->n_tokens * heads, w->thread, w->n_threads, &from, &to);
    for (int64_t unit = from; unit < to; unit++) {
        int64_t t = unit / heads, head = unit % heads, position = j->position[t];
        int is_key = head >= l->n_q_heads;
        float *x = j->qkv + t * ld + head * kv->dk;
        const float *norm = is_key ? l->k_norm : l->q_norm;
        if (norm) norm_row(x, norm, j->model->eps, kv->dk, x);
        rope_row(x, l->cos + position * (l->rot / 2), l->sin + position * (l->rot / 2), l->rot);
        if (!is_key) continue;
        int64_t key_head = head - l->n_q_heads, slot = position - g->kv_start[j->seq[t]];
        int64_t page = g->page_table[j->seq[t] * g->table_stride + slot / kv->page_size];
        const float *v = j->qkv + t * ld + k_at + kv->n_heads * (int64_t)kv->dk + key_head * kv->dv;
        kv_put(kv, page, slot % kv->page_size, (int)key_head, x, v);
    }
    if (w->thread == 0) plan_reset(j->plans[l->plan]);
    barrier();
}

static void run_layer(const worker *w, const pw_layer *l) {
    step_job *j = w->job;
    int64_t n = j->batch->n_tokens, hidden = j->model->hidden;
    activations a = encode(w, j->x, hidden, l->attn_norm, NULL, n, &l->qkv);
    multiply(w, &a, &l->qkv, OUT_STORE, j->qkv, l->qkv.n);
    rope_and_write(w, l);
    pw_attn args = attention_of(j, l);
    attend(j->plans[l->plan], &args, &l->kv, j->qkv, l->qkv.n, j->attn, l->o.k);
    barrier();
    a = encode(w, j->attn, l->o.k, NULL, NULL, n, &l->o);
    multiply_add(w, &a, &l->o, l->post_attn_norm);
    a = encode(w, j->x, hidden, l->ffn_norm, NULL, n, &l->gate_up);
    multiply(w, &a, &l->gate_up, l->gate, j->ffn, l->down.k);
    a = encode(w, j->ffn, l->down.k, NULL, NULL, n, &l->down);
    multiply_add(w, &a, &l->down, l->post_ffn_norm);
}

static void embed(const worker *w) {
    step_job *j = w->job;
    int64_t width = j->model->hidden, from, to;
    share(j->batch->n_tokens, w->thread, w->n_threads, &from, &to);
    for (int64_t t = from; t < to; t++) {
        float *x = j->x + t * width;
        if (j->batch->embeddings) memcpy(x, j->batch->embeddings + t * width, (size_t)width * 4);
        else gather_row(&j->model->embed, j->batch->ids[t], x);
        for (int64_t i = 0; i < width; i++) x[i] *= j->model->embed_scale;
    }
    barrier();
}

static void cap_logits(const worker *w, int64_t width) {
    int64_t from, to;
    float cap = w->job->model->logit_softcap;
    share(w->job->batch->n_rows * width, w->thread, w->n_threads, &from, &to);
    float *x = w->job->batch->logits;
    for (int64_t i = from; i < to; i++) x[i] = cap * tanhf(x[i] / cap);
}

static void step_main(int thread, int n_threads, void *arg) {
    worker w = {arg, thread, n_threads};
    step_job *j = arg;
    const pw_model *m = j->model;
    const pw_batch *b = j->batch;
    if (thread == 0) prepare(j, n_threads);
    barrier();
    embed(&w);
    for (int i = 0; i < m->n_layers; i++) run_layer(&w, &m->layers[i]);
    if (b->hidden) {
        int64_t from, to;
        share(b->n_tokens, thread, n_threads, &from, &to);
        for (int64_t t = from; t < to; t++)
            norm_row(j->x + t * m->hidden, m->final_norm, m->eps, m->hidden, b->hidden + t * m->hidden);
    }
    if (b->n_rows == 0) return;
    activations a = encode(&w, j->x, m->hidden, m->final_norm, b->rows, b->n_rows, &m->head);
    multiply(&w, &a, &m->head, OUT_STORE, b->logits, m->head.n);
    if (m->logit_softcap > 0) cap_logits(&w, m->head.n);
}

EXPORT void pw_step(const pw_model *model, const pw_batch *batch, int n_threads) {
    step_job j = {.model = model, .batch = batch};
    if (batch->n_tokens > 0) run_parallel(n_threads, step_main, &j);
}
