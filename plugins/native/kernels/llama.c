/* One pass of a LLaMA over the rows of a token tree, after a cache that it extends in place. */
#include "acceptance.h"
#include "commit.h"
#include "embedding.h"
#include "instructions.h"
#include "keys.h"
#include "linear.h"
#include "residual.h"
#include "rounding.h"
#include "units.h"

struct job {
    struct engine *engine;
    const struct pass *pass;
};

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
