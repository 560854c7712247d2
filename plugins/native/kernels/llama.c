/* One pass of a LLaMA over the rows of a token tree, after a cache that it extends in place. */
#include "acceptance.h"
#include "commit.h"
#include "embedding.h"
#include "engine.h"
#include "instructions.h"
#include "residual.h"
#include "rounding.h"
#include "units.h"

struct job {
    struct engine *engine;
    const struct pass *pass;
};

/* 1 / rms, of `size` numbers whose squares were added by lanes. */
INLINE float share_of(const f32 *squares, int size, float epsilon) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += lane_of(squares, lane);
    return 1.0f / sqrtf(sum / (float)size + epsilon);
}

/* result = values / rms(values) * weight, which may lie in one place. */
INLINE void norm_row(const struct model *model, const float *values, const float *weight, float *result) {
    f32 squares[PARTS] = {{0}};
    for (int k = 0; k < model->hidden; k += LANES)
        UNROLL(4) for (int part = 0; part < PARTS; part++) {
            const f32 value = load(values + k + part * WIDTH);
            squares[part] += value * value;
        }
    const float share = share_of(squares, model->hidden, model->epsilon);
    for (int k = 0; k < panels_of(model->hidden) * LANES; k += WIDTH)
        store(result + k, load(values + k) * share * load(weight + k));
}

/* normed = hidden / rms(hidden) * weight, rounded as `next` multiplies it. */
static void normalize(const struct model *model, const struct rows *from, int row, const float *weight,
                      const struct rows *to, int into, const struct matrix *next) {
    norm_row(model, from->values + (size_t)row * from->stride, weight, to->values + (size_t)into * to->stride);
    round_row(to, into, next);
}

/* row += factor * from / rms(from) * weight. */
static void add_normed(const struct model *model, const struct rows *from, int row, const float *weight, float factor,
                       const struct rows *to) {
    const float *values = from->values + (size_t)row * from->stride;
    float *result = to->values + (size_t)row * to->stride;
    f32 squares[PARTS] = {{0}};
    for (int k = 0; k < model->hidden; k += WIDTH) {
        const f32 value = load_some(values + k, model->hidden - k, 0);
        squares[k / WIDTH % PARTS] += value * value;
    }
    const float share = share_of(squares, model->hidden, model->epsilon);
    for (int k = 0; k < model->hidden; k += WIDTH) {
        const f32 value = load_some(values + k, model->hidden - k, 0) * share * load(weight + k);
        store(result + k, load(result + k) + value * factor);
    }
}

/* What becomes of a tile's sums: they are stored, or added to what is there, times a factor; or are gate and up in turn,
 * for SiLU or GELU; or their SiLU is added to the row that was multiplied. */
enum ending { STORE, ADD, GATE, GATE_GELU, RESIDUAL };
INLINE int gates(const enum ending ending) { return ending == GATE || ending == GATE_GELU; }

INLINE void finish(const struct matrix *matrix, const enum ending ending, float factor, int panel, int panels,
                   const f32 *sums, const float *row, float *result) {
    f32 sum[VECTORS];
    for (int v = 0; v < panels * PARTS; v++) {
        sum[v] = sums[v];
        if (matrix->bias) sum[v] += load(matrix->bias + panel * LANES + v * WIDTH);
    }
    for (int v = 0; v < panels * PARTS; v++) {
        const int column = panel * LANES + v * WIDTH;
        if (ending == STORE) store_some(result + column, sum[v] * factor, matrix->outputs - column);
        if (ending == ADD) store(result + column, load(result + column) + sum[v] * factor);
        if (ending == RESIDUAL) store(result + column, load(row + column) + silu(sum[v]));
        if (gates(ending) && v >= PARTS) { /* panels of gate and up in turn */
            const f32 gate = ending == GATE ? silu(sum[v - PARTS]) : gelu(sum[v - PARTS]);
            store(result + panel / 2 * LANES + v % PARTS * WIDTH, gate * sum[v]);
        }
    }
}

/* Panels that are finished together: two are multiplied at once, of gate and up as many as are rounded at once. */
INLINE int whole_panels(const enum ending ending) { return gates(ending) ? 2 * ROUNDED / LANES : MOST_PANELS; }

/* How panels are cut into units: each has as many `pieces`, of `size` panels that stay together, or one more. */
struct division {
    int panels, size, pieces, units;
};

INLINE struct division cut_panels(const struct matrix *matrix, const enum ending ending, int threads) {
    const int panels = panels_of(matrix->outputs), shares = threads * SHARES;
    const int size = panels <= shares && !gates(ending) ? 1 : whole_panels(ending), pieces = (panels + size - 1) / size;
    return (struct division){panels, size, pieces, pieces < shares ? pieces : shares};
}

/* The first panel of a unit. */
INLINE int unit_panel(const struct division *of, int unit) {
    const int panel = (int)((int64_t)of->pieces * unit / of->units) * of->size;
    return panel < of->panels ? panel : of->panels;
}

/* Let the thread fetch the beginning of its share of a matrix while it waits before that. */
static void expect(struct cursor *cursor, const struct matrix *matrix, const enum ending ending) {
    const struct division all = cut_panels(matrix, ending, cursor->team->threads);
    const int first = unit_panel(&all, first_own(all.units, cursor->thread, cursor->team->threads));
    const size_t bytes = panel_bytes(matrix), rest = (all.panels - first) * bytes;
    cursor->ahead = (const char *)matrix->weights + first * bytes;
    cursor->end = cursor->ahead + (rest < MOST_AHEAD ? rest : MOST_AHEAD);
}

/* rows of `from` times the matrix; every thread takes a unit of panels at a time, for as long as there are any. next:
 * of gate and up, the matrix for which the results are rounded. */
static void linear(struct cursor *cursor, const struct matrix *matrix, const struct rows *from, int rows,
                   const struct rows *to, const enum ending ending, float factor, const struct matrix *next) {
    const struct tiles tiles = tiles_of(matrix, from, rows);
    const struct division all = cut_panels(matrix, ending, cursor->team->threads);
    const int whole = whole_panels(ending);
    f32 sums[MOST_TILE][VECTORS];
    for (int unit; (unit = claim_own(cursor, all.units)) >= 0;) {
        const int end = unit_panel(&all, unit + 1);
        for (int panel = unit_panel(&all, unit), step; panel < end; panel += step) {
            step = end - panel < MOST_PANELS ? 1 : MOST_PANELS;
            for (int tile = 0; tile < tiles.count; tile++) {
                const int row = tile_row(&tiles, tile), count = tile_row(&tiles, tile + 1) - row;
                multiply(matrix, from, &tiles, tile, panel, step, sums[0]);
                for (int r = 0; r < count; r++)
                    finish(matrix, ending, factor, panel, step, sums[r],
                           from->values + (size_t)(row + r) * from->stride, to->values + (size_t)(row + r) * to->stride);
            }
            const int first = panel / whole * whole, done = panel + step == first + whole || panel + step == end;
            for (int row = 0; gates(ending) && done && row < rows; row++)
                round_inputs(to, row, first * LANES / 2, first * LANES / 2 + ROUNDED, next);
        }
    }
}

/* head := head / rms(head) * weight. Heads lie side by side: what follows one is another. */
static void normalize_head(float *head, const float *weight, int dim, float epsilon) {
    f32 squares[PARTS] = {{0}};
    for (int d = 0; d < dim; d += WIDTH) {
        const f32 value = load_some(head + d, dim - d, 0);
        squares[d / WIDTH % PARTS] += value * value;
    }
    const float share = share_of(squares, dim, epsilon);
    for (int d = 0; d < dim; d += WIDTH)
        store_some(head + d, load_some(head + d, dim - d, 0) * share * load(weight + d), dim - d);
}

/* head := head times `factor`, the first 2 * `pairs` rotated by position: halves as Hugging Face stores them. */
static void rotate(float *head, const float *cosine, const float *sine, int pairs, int dim, float factor) {
    for (int d = 0; d < pairs; d++) {
        float low = head[d], high = head[d + pairs];
        head[d] = fmaf(low, cosine[d], -(high * sine[d])) * factor; /* says which of the products is rounded */
        head[d + pairs] = fmaf(high, cosine[d], low * sine[d]) * factor;
    }
    for (int d = 2 * pairs; d < dim; d++) head[d] *= factor;
}

/* Spread every number over the `run` numbers of its part of a head, by a Walsh-Hadamard transform. A product of two
 * heads that are spread is `run` times as large, and otherwise the same. Some models' keys have a few numbers that are a
 * hundred times as large as the others (those of Qwen2.5, by its biases), which codes with one scale would lose. */
static void spread(float *head, int dim, int run) {
    for (int half = 1; half < run; half *= 2)
        for (int first = 0; first < dim; first += 2 * half)
            for (int d = first; d < first + half; d++) {
                const float low = head[d], high = head[d + half];
                head[d] = low + high, head[d + half] = low - high;
            }
}

/* Subtract a key's bias from it where position turns it by less than half a radian in 1,024 tokens: this changes all
 * scores of a query by the same number. */
static void shift(float *key, const struct layer *layer, const float *bias, int dim, int positions) {
    for (int d = 0; d < dim; d++) {
        int slow = 1;
        for (int position = 1; d < 2 * layer->pairs && position <= 1024 && position < positions; position *= 4)
            slow = slow && layer->cosine[position * layer->pairs + d % layer->pairs] > 0.88f;
        if (slow) key[d] -= bias[d];
    }
}

/* Normalize, where the layer does, and rotate the queries and keys of one kv head of a layer; queries come to lie
 * side by side, keys and values go into the cache. By head, since rows share the cache's lines. */
static void remember(const struct engine *engine, const struct layer *layer, const struct pass *pass, int head) {
    const struct model *model = &engine->model;
    const int dim = model->head_dim, pairs = layer->pairs, group = model->heads / model->kv_heads;
    const struct cache own = head_of(&pass->cache, dim, (layer - model->layer) * model->kv_heads + head);
    const int run = own.format == INT8 ? dim & -dim : 1; /* the largest power of two that divides dim */
    float *query = queries_of(engine, pass->rows, head);
    for (int row = 0; row < pass->rows; row++) {
        const float *cosine = layer->cosine + pass->positions[row] * pairs;
        const float *sine = layer->sine + pass->positions[row] * pairs;
        float *from = engine->merged.values + (size_t)row * engine->merged.stride;
        float *key = from + (model->heads + head) * dim, *value = key + model->kv_heads * dim;
        memcpy(query, from + head * group * dim, (size_t)group * dim * sizeof(float));
        for (int q = 0; q < group; q++, query += dim) {
            if (layer->query_norm) normalize_head(query, layer->query_norm, dim, model->epsilon);
            rotate(query, cosine, sine, pairs, dim, LOG2_E * model->attention_scale / (float)run);
            spread(query, dim, run);
        }
        if (layer->key_norm) normalize_head(key, layer->key_norm, dim, model->epsilon);
        rotate(key, cosine, sine, pairs, dim, 1.0f);
        if (own.format == INT8 && layer->qkv.bias)
            shift(key, layer, layer->qkv.bias + (model->heads + head) * dim, dim, model->positions);
        spread(key, dim, run);
        put(&own, dim, pass->slots ? (int)pass->slots[row] : pass->start + row, key, value);
    }
}

/* Add rows times a matrix to the hidden rows; through the normed rows, free by then, where they are `normed` before. */
static void add_product(struct cursor *cursor, const struct matrix *matrix, const struct rows *from, int rows,
                        struct engine *engine, int normed) {
    if (normed) linear(cursor, matrix, from, rows, &engine->normed, STORE, 1, NULL);
    else linear(cursor, matrix, from, rows, &engine->hidden, ADD, engine->model.residual_multiplier, NULL);
}

/* A row of a draft that reads states: its own state, to which the fusion is added; and the normed embedding. */
static void enter(struct engine *engine, const struct pass *pass, int row) {
    const struct model *model = &engine->model;
    const int inputs = model->fusion.inputs;
    const float *given = pass->given + (size_t)row * (inputs + model->hidden);
    float *token = engine->normed.values + (size_t)row * engine->normed.stride;
    memcpy(engine->hidden.values + (size_t)row * engine->hidden.stride, given + inputs, model->hidden * sizeof(float));
    look_up(&model->embedding, pass->tokens[row], model->hidden, model->embedding_multiplier, token);
    memset(token + model->hidden, 0, (engine->normed.stride - model->hidden) * sizeof(float));
    norm_row(model, token, model->layer->token_norm, token);
    if (!engine->fuses) return;
    memcpy(engine->fused.values + (size_t)row * engine->fused.stride, given, inputs * sizeof(float));
    round_row(&engine->fused, row, &model->fusion);
}

/* The normed state beside the normed embedding. */
static void join(struct engine *engine, int row) {
    const struct model *model = &engine->model;
    float *values = engine->hidden.values + (size_t)row * engine->hidden.stride;
    float *normed = engine->normed.values + (size_t)row * engine->normed.stride + model->hidden;
    norm_row(model, values, model->layer->input_norm, normed);
    if (model->layer->norm_first) memcpy(values, normed, model->hidden * sizeof(float));
    round_row(&engine->normed, row, &model->layer->qkv);
}

/* Whether the caller reads the rows after a layer. */
INLINE int shows(const struct layer *layer, const struct pass *pass) { return layer->tap && pass->states; }

static void transform(struct cursor *cursor, struct engine *engine, const struct pass *pass, float *scores) {
    const struct model *model = &engine->model;
    struct rows *hidden = &engine->hidden, *normed = &engine->normed, *merged = &engine->merged;
    const int reads = model->fusion.weights != NULL;
    for (int row; (row = claim(cursor, pass->rows)) >= 0;) {
        float *values = hidden->values + (size_t)row * hidden->stride;
        if (reads) enter(engine, pass, row);
        else look_up(&model->embedding, pass->tokens[row], model->hidden, model->embedding_multiplier, values);
        memset(values + model->hidden, 0, (hidden->stride - model->hidden) * sizeof(float)); /* no infinity stays */
        pack_mask(&engine->mask, row, pass->mask, pass->length, pass->columns, model->window);
        if (!reads) normalize(model, hidden, row, model->layer->input_norm, normed, row, &model->layer->qkv);
    }
    if (engine->fuses) linear(cursor, &model->fusion, &engine->fused, pass->rows, hidden, ADD, 1, NULL);
    for (int row; reads && (row = claim(cursor, pass->rows)) >= 0;) join(engine, row);
    for (int once; (once = claim(cursor, 1)) >= 0;) cut(engine, pass->rows);
    for (int index = 0; index < model->layers; index++) {
        const struct layer *layer = &model->layer[index];
        expect(cursor, &layer->output, ADD);
        linear(cursor, &layer->qkv, normed, pass->rows, merged, STORE, 1, NULL);
        const int alone = units_are_heads(engine);
        for (int head; (head = claim(cursor, model->kv_heads)) >= 0;) {
            remember(engine, layer, pass, head);
            if (alone) attend_unit(engine, pass, index, head, scores);
        }
        if (!alone) attention(cursor, engine, pass, index, scores);
        if (!rounds_outputs(engine, layer))
            for (int row; (row = claim(cursor, pass->rows)) >= 0;) round_row(&engine->attended, row, &layer->output);
        expect(cursor, &layer->gate_up, GATE);
        add_product(cursor, &layer->output, &engine->attended, pass->rows, engine, layer->output_norm != NULL);
        for (int row; (row = claim(cursor, pass->rows)) >= 0;) {
            if (layer->output_norm) add_normed(model, normed, row, layer->output_norm, model->residual_multiplier, hidden);
            normalize(model, hidden, row, layer->post_norm, normed, row, &layer->gate_up);
        }
        expect(cursor, &layer->down, ADD);
        if (model->gelu) linear(cursor, &layer->gate_up, normed, pass->rows, &engine->gated, GATE_GELU, 1, &layer->down);
        else linear(cursor, &layer->gate_up, normed, pass->rows, &engine->gated, GATE, 1, &layer->down);
        const int last = index + 1 == model->layers;
        expect(cursor, last ? &model->head : &layer[1].qkv, STORE);
        add_product(cursor, &layer->down, &engine->gated, pass->rows, engine, layer->down_norm != NULL);
        const int follows = layer->down_norm || !last || shows(layer, pass);
        for (int row; follows && (row = claim(cursor, pass->rows)) >= 0;) {
            if (layer->down_norm) add_normed(model, normed, row, layer->down_norm, model->residual_multiplier, hidden);
            if (shows(layer, pass))
                memcpy(pass->states + ((size_t)row * model->taps + layer->tap - 1) * model->hidden,
                       hidden->values + (size_t)row * hidden->stride, model->hidden * sizeof(float));
            if (!last) normalize(model, hidden, row, layer[1].input_norm, normed, row, &layer[1].qkv);
        }
    }
}

/* The head of SpecDec++ on the normed rows; those of `hidden`, which nobody needs any more, are room to work in. */
static void judge(struct cursor *cursor, struct engine *engine, const struct pass *pass) {
    const struct model *model = &engine->model;
    struct rows *from = &engine->normed, *to = &engine->hidden;
    for (int index = 0; index < model->blocks; index++) {
        linear(cursor, &model->block[index], from, pass->outputs, to, RESIDUAL, 1, NULL);
        struct rows *result = to;
        to = from, from = result;
    }
    for (int output; (output = claim(cursor, pass->outputs)) >= 0;)
        pass->acceptance[output] =
            acceptance(from->values + (size_t)output * from->stride, model->odds, model->hidden, model->shift);
}

/* Only the rows somebody asked for go through the vocabulary projection. */
static void project(struct cursor *cursor, struct engine *engine, const struct pass *pass) {
    const struct model *model = &engine->model;
    struct rows *normed = &engine->normed;
    for (int output; (output = claim(cursor, pass->outputs)) >= 0;)
        normalize(model, &engine->hidden, (int)pass->output_rows[output], model->norm, normed, output, &model->head);
    const int columns = model->head.outputs; /* fewer than tokens where a draft's vocabulary is trimmed */
    const struct rows logits = {.values = pass->logits, .stride = columns};
    linear(cursor, &model->head, normed, pass->outputs, &logits, STORE, model->logits_multiplier, NULL);
    for (int output; pass->ids && (output = claim(cursor, pass->outputs)) >= 0;)
        rank(pass->logits + (size_t)output * columns, columns, pass->top,
             pass->ids + (size_t)output * pass->top, pass->logprobs + (size_t)output * pass->top);
    for (int index; (index = claim(cursor, pass->drawn)) >= 0;)
        prepare_draw(pass->logits + (size_t)pass->draw_outputs[index] * columns, columns, pass->draws + index);
    if (pass->acceptance) judge(cursor, engine, pass);
}

static void run(struct team *team, int thread, void *argument) {
    struct job *job = argument;
    struct cursor cursor = {team, thread};
    float *scores = job->engine->scores + (size_t)thread * job->engine->most_queries * odd_lines(job->engine->capacity);
    const int registers = job->engine->normed.halves != NULL;
    if (registers) open_registers();
    transform(&cursor, job->engine, job->pass, scores);
    project(&cursor, job->engine, job->pass);
    if (registers) close_registers();
}

int draftwood_interface(void) { return INTERFACE; }

void draftwood_close(struct engine *engine) {
    if (engine->team) close_team(engine->team);
    struct rows *all[] = {&engine->hidden,   &engine->normed, &engine->merged,
                          &engine->attended, &engine->gated,  &engine->fused};
    for (int index = 0; index < 6; index++) free_rows(all[index]);
    release(engine->mask.bits), release(engine->mask.runs), release(engine->mask.counts), release(engine->units);
    release(engine->mask.nearest);
    release(engine->scores), release(engine->peaks), release(engine->queries), release(engine);
}

/* An engine for passes of up to `rows` rows on that many threads; null without memory, or for more layers than
 * there are phases for. `model` is copied, what it points to is not. */
struct engine *draftwood_open(const struct model *model, int rows, int threads) {
    if (phases_of(model) > MOST_PHASES) return NULL;
    struct engine *engine = allocate(sizeof *engine);
    if (!engine) return NULL;
    engine->model = *model;
    engine->most_rows = rows;
    engine->team = open_team(threads < 1 ? 1 : threads < MOST_THREADS ? threads : MOST_THREADS);
    const int query = model->heads * model->head_dim, key = model->kv_heads * model->head_dim;
    const int halves = model->head.format == BF16 && (HALF_PAIRS || registers_allowed());
    const int reads = model->fusion.weights != NULL;
    int enough = engine->team && allocate_rows(&engine->hidden, rows, model->hidden, 0);
    enough = enough && allocate_rows(&engine->normed, rows, (reads + 1) * model->hidden, halves);
    enough = enough && (!reads || allocate_rows(&engine->fused, rows, model->fusion.inputs, halves));
    enough = enough && allocate_rows(&engine->merged, rows, query + 2 * key, 0);
    enough = enough && allocate_rows(&engine->attended, rows, query, halves);
    enough = enough && allocate_rows(&engine->gated, rows, model->inner, halves);
    engine->queries = allocate((size_t)rows * query * sizeof(float));
    engine->units = allocate(((size_t)rows * (model->heads / model->kv_heads) + 1) * sizeof(int));
    if (enough) engine->most_queries = queries_at_once(model, rows, engine->team->threads);
    const size_t peaks = enough ? (size_t)engine->team->threads * (PARTS_OF_SCORES + SHARES) * engine->most_queries : 0;
    engine->peaks = allocate(peaks * sizeof(float));
    if (enough && engine->queries && engine->units && engine->peaks) return engine;
    draftwood_close(engine);
    return NULL;
}

/* Whether any row's states of the target are others than zeros: without them the fusion adds nothing. */
static int has_targets_states(const struct model *model, const struct pass *pass) {
    const int inputs = model->fusion.inputs;
    for (int row = 0; row < pass->rows; row++)
        for (int k = 0; k < inputs; k++)
            if (pass->given[(size_t)row * (inputs + model->hidden) + k] != 0) return 1;
    return 0;
}

/* Run a pass; 0, or one of library.py's REFUSALS. The caller has checked that the slots are there. */
int draftwood_forward(struct engine *engine, const struct pass *pass) {
    const struct model *model = &engine->model;
    if (pass->rows < 1 || pass->rows > engine->most_rows || pass->outputs > pass->rows) return 5;
    if (model->fusion.weights && !pass->given) return 7;
    for (int row = 0; row < pass->rows; row++) {
        if (pass->tokens[row] < 0 || pass->tokens[row] >= model->vocab) return 2;
        if (pass->positions[row] < 0 || pass->positions[row] >= model->positions) return 3;
    }
    for (int output = 0; output < pass->outputs; output++)
        if (pass->output_rows[output] < 0 || pass->output_rows[output] >= pass->rows) return 4;
    for (int index = 0; index < pass->drawn; index++)
        if (pass->draw_outputs[index] < 0 || pass->draw_outputs[index] >= pass->outputs) return 4;
    struct job job = {engine, pass};
    pthread_mutex_lock(&engine->team->pass);
    const int enough = make_room(engine, pass->cache.capacity);
    engine->mask.panels = (pass->length + pass->columns + LANES - 1) / LANES;
    engine->fuses = model->fusion.weights && has_targets_states(model, pass);
    if (enough) together(engine->team, (int)phases_of(model), run, &job);
    pthread_mutex_unlock(&engine->team->pass);
    return !enough;
}

/* result [rows][outputs] = values [rows][inputs] times one matrix, on this thread; 0, or -1 without memory. */
int draftwood_linear(const struct matrix *matrix, const float *values, int rows, float *result) {
    struct rows x = {0};
    const int halves = matrix->format == BF16 && (HALF_PAIRS || registers_allowed());
    const int enough = allocate_rows(&x, rows, matrix->inputs, halves), panels = panels_of(matrix->outputs);
    for (int row = 0; enough && row < rows; row++) {
        const float *from = values + (size_t)row * matrix->inputs;
        memcpy(x.values + (size_t)row * x.stride, from, matrix->inputs * sizeof(float));
        round_row(&x, row, matrix);
    }
    const struct tiles tiles = tiles_of(matrix, &x, rows);
    if (halves) open_registers();
    for (int tile = 0; enough && tile < tiles.count; tile++) {
        const int row = tile_row(&tiles, tile), count = tile_row(&tiles, tile + 1) - row;
        for (int panel = 0, step; panel < panels; panel += step) {
            f32 sums[MOST_TILE][VECTORS];
            step = panels - panel < MOST_PANELS ? 1 : MOST_PANELS;
            multiply(matrix, &x, &tiles, tile, panel, step, sums[0]);
            for (int r = 0; r < count; r++)
                finish(matrix, STORE, 1, panel, step, sums[r], NULL, result + (size_t)(row + r) * matrix->outputs);
        }
    }
    if (halves) close_registers();
    free_rows(&x);
    return enough ? 0 : -1;
}
