/* Every function that the kernels export, over the edges of every shape, for a program that is compiled with
 * sanitizers (test_native_edges.py). Every array is allocated with its exact size, so that one number too many shows.
 * Results are compared where a plain loop says what they are. */
#include "native_models.h"
#include <stdio.h>

static int checks;

static void check(int holds, const char *what, int size) {
    checks++;
    if (holds) return;
    printf("%s at size %d\n", what, size);
    exit(1);
}

static const double TEMPERATURES[] = {5e-324, 1e-46, 1e-38, 0.7, 1, 3.3e37, 1e39, 1.7e308};
static const int SIZES[] = {1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 511, 513, 1000};
#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

enum kind { RANDOM, EQUAL, BANNED, LARGE, WITH_NAN, WITH_INFINITY, NOTHING, KINDS };

static float *logits_of(int size, enum kind kind) {
    float *logits = numbers(size);
    for (int at = 0; at < size; at++) {
        if (kind == EQUAL) logits[at] = 0.25f;
        if (kind == BANNED && at % 3 == 1) logits[at] = -INFINITY;
        if (kind == LARGE) logits[at] *= 3.4e38f;
        if (kind == NOTHING) logits[at] = -INFINITY;
    }
    if (kind == WITH_NAN) logits[size - 1] = NAN;
    if (kind == WITH_INFINITY) logits[size / 2] = INFINITY;
    return logits;
}

/* What is offered, what is left after a rejection, and what a token is then drawn from. */
static void check_residual(const struct row *row, double total) {
    const int runs = (row->size + RUN - 1) / RUN;
    for (int count = 0; count <= row->size && count <= 300; count = 2 * count + 1) {
        int64_t *ids = malloc(count * sizeof *ids);
        double *R = malloc((count + 2) * sizeof *R), *offered = malloc(count * sizeof *offered), sum = 0;
        for (int at = 0; at < count; at++) {
            ids[at] = (int64_t)at * row->size / count;
            offered[at] = 1.0 / count;
        }
        const struct offers offers = {ids, count, R};
        check(!draftwood_offer(row, &offers, total), "offers", row->size);
        for (int at = 0; at <= count; at++) sum += R[at];
        check(fabs(sum - 1) < 1e-9, "a residual", row->size);
        const double pi = draftwood_reject(&offers, offered, 0.5);
        check(pi >= 0 && pi <= 1, "a rejection", row->size);
        double *masses = malloc(runs * sizeof *masses), most = 0;
        draftwood_residual_runs(row, &offers, masses);
        for (int run = 0; pi && run < runs; run++) {
            const int columns = run < runs - 1 ? RUN : row->size - run * RUN;
            double *chosen = malloc(RUN * sizeof *chosen), drawn = 0;
            check(masses[run] >= 0 && draftwood_residual_run(row, &offers, run, chosen) == columns, "a run", row->size);
            for (int at = 0; at < columns; at++) drawn += chosen[at];
            check(masses[run] == 0 || fabs(drawn - 1) < 1e-9, "a draw", row->size);
            most += masses[run];
            free(chosen);
        }
        check(!pi || fabs(most - 1) < 1e-9, "runs", row->size);
        if (count) {
            ids[count - 1] = count % 2 ? row->size : -1;
            check(draftwood_offer(row, &offers, total) == -1, "a token of no column", row->size);
        }
        free(ids), free(R), free(offered), free(masses);
    }
}

static void check_sampling(int size, enum kind kind, double temperature) {
    const int numbers_only = kind != WITH_NAN && kind != WITH_INFINITY && kind != NOTHING;
    float *logits = logits_of(size, kind), *weights = malloc(size * sizeof(float));
    double *sums = malloc((size + RUN - 1) / RUN * sizeof *sums);
    float peak;
    const double total = draftwood_softmax(logits, size, temperature, sums, &peak);
    check(numbers_only ? total >= 0.999 && total <= size * 1.001 : isnan(total), "softmax", size);
    if (numbers_only) draftwood_weigh(logits, size, peak, temperature, weights);
    for (int first = 0; numbers_only && first < size; first += 1 + size / 3) {
        float *some = malloc((size - first) * sizeof(float));
        draftwood_weigh(logits + first, size - first, peak, temperature, some);
        check(!memcmp(some, weights + first, (size - first) * sizeof(float)), "weights of some", size);
        free(some);
    }
    if (numbers_only) check_residual(&(struct row){logits, size, peak, temperature, sums}, total);
    for (int room = 0; room <= size; room += room < 2 ? 1 : size) {
        int64_t *ids = malloc(room * sizeof *ids);
        double *chances = malloc(room * sizeof *chances);
        const int count = draftwood_likely(logits, size, temperature, 1e-4, room, ids, chances);
        check(numbers_only ? count >= 1 && count <= size : count == -1, "likely", size);
        for (int at = 0; at < room && at < count; at++) {
            check(ids[at] >= 0 && ids[at] < size && (!at || ids[at] > ids[at - 1]), "ids", size);
            check(chances[at] > 0 && chances[at] <= 1 && isfinite(logits[ids[at]]), "chances", size);
        }
        free(ids), free(chances);
    }
    free(sums), free(logits), free(weights);
}

/* Codes, scales and offsets of numbers from -size to size; of a matrix of one block with feedback, too. */
static void check_rounding(int outputs, int blocks, float size, int more) { /* more: bits, than 4 and 6 */
    const size_t inputs = (size_t)blocks * CODE_BLOCK, count = outputs * inputs;
    const float shares[] = {0.8f, 1.0f};
    const size_t bytes = (size_t)outputs * blocks * (more ? 1 : 2) * sizeof(float);
    float *weights = numbers(count), *feedback = numbers(CODE_BLOCK * CODE_BLOCK);
    float *left = malloc(count * sizeof(float)), *scales = malloc(bytes), *offsets = malloc(bytes);
    uint8_t *codes = malloc(count);
    for (size_t at = 0; at < count; at++) weights[at] *= size;
    for (int fed = 0; fed < (blocks == 1 ? 2 : 1); fed++) {
        draftwood_round(weights, outputs, (int)inputs, 4 + more, shares, COUNT(shares), fed ? feedback : NULL, codes,
                        scales, offsets, fed ? left : NULL);
        for (size_t at = 0; at < count; at++) {
            check(codes[at] <= (more ? 31 : 15), "codes", outputs);
            const size_t block = at / CODE_BLOCK;
            const float error = fabsf(codes[at] * scales[block] + offsets[block] - weights[at]);
            check(fed || !(size > 1e-3f && size < 1e3f) || error <= size / 6, "an error of rounding", outputs);
        }
        for (int at = 0; at < outputs * blocks; at++)
            check(scales[at] > 0 && isfinite(scales[at]) && isfinite(offsets[at]), "scales", outputs);
    }
    draftwood_round_signed(weights, outputs, (int)inputs, 6 + 2 * more, (int8_t *)codes, scales);
    for (size_t at = 0; at < count; at++) {
        const float scale = scales[at / group_of(6 + 2 * more)], error = fabsf((int8_t)codes[at] * scale - weights[at]);
        check(scale > 0 && isfinite(scale), "scales of signed codes", outputs);
        check(size > 1e6f || error <= 0.501f * scale, "an error of signed codes", outputs);
    }
    free(weights), free(feedback), free(left), free(scales), free(offsets), free(codes);
}

static void check_linear(int outputs, int inputs, int rows, enum format format) {
    struct matrix matrix = matrix_of(outputs, inputs, format, rows % 2);
    float *values = numbers((size_t)rows * inputs), *result = malloc((size_t)rows * outputs * sizeof(float));
    check(!draftwood_linear(&matrix, values, rows, result), "linear", outputs);
    for (int at = 0; at < rows * outputs; at++) check(isfinite(result[at]), "products", outputs);
    float *broken = malloc((size_t)rows * inputs * sizeof(float)), *none = malloc((size_t)rows * outputs * sizeof(float));
    memcpy(broken, values, (size_t)rows * inputs * sizeof(float));
    broken[inputs / 2] = outputs % 2 ? NAN : -INFINITY;
    check(!draftwood_linear(&matrix, broken, rows, none), "linear", outputs);
    for (int at = 0; at < outputs && format >= INT8; at++) check(isnan(none[at]), "products of no number", outputs);
    free(broken), free(none);
    if (format == FP32)
        for (int row = 0; row < rows; row++)
            for (int output = 0; output < outputs; output++) {
                double sum = matrix.bias ? matrix.bias[output] : 0;
                const float *panel = (const float *)matrix.weights + (size_t)output / LANES * inputs * LANES;
                for (int k = 0; k < inputs; k++)
                    sum += (double)values[row * inputs + k] * panel[k * LANES + output % LANES];
                check(fabs(sum - result[row * outputs + output]) < 1e-4, "a product", outputs);
            }
    free_matrix(matrix), free(values), free(result);
}

static void check_acceptance(int size) {
    float *row = numbers(size), *odds = numbers(size);
    double sum = 0.25;
    for (int k = 0; k < size; k++) sum += (double)row[k] * odds[k];
    check(fabs(acceptance(row, odds, size, 0.25f) - 1 / (1 + exp(-sum))) < 1e-6, "acceptance", size);
    free(row), free(odds);
}

/* [slots][heads][keys and their scale, values and their scale], by plain loops. */
static float *numbers_of_slots(const struct cache *cache, struct shape shape, const int64_t *slots, int count) {
    const int heads = shape.layers * shape.kv_heads, dim = shape.head_dim, capacity = cache->capacity;
    float *all = calloc((size_t)count * heads * 2 * (dim + 1), sizeof(float)), *to = all;
    for (int at = 0; at < count; at++)
        for (size_t head = 0; head < (size_t)heads; head++)
            for (int value = 0; value < 2; value++) {
                const float *scales = value ? cache->value_scales : cache->key_scales;
                for (int d = 0; d < dim; d++) {
                    const size_t slot = slots[at], panels = (dim + LANES - 1) / LANES;
                    const size_t index = value ? ((head * panels + d / LANES) * capacity + slot) * LANES + d % LANES
                                               : (head * (capacity / LANES) + slot / LANES) * dim * LANES +
                                                     (size_t)d * LANES + slot % LANES;
                    const void *from = value ? cache->values : cache->keys;
                    if (cache->format == FP32) *to++ = ((const float *)from)[index];
                    if (cache->format == FP16) *to++ = ((const uint16_t *)from)[index];
                    if (cache->format == INT8) *to++ = ((const int8_t *)from)[index];
                }
                *to++ = scales ? scales[head * capacity + slots[at]] : 0;
            }
    return all;
}

/* fp16 of every kind, as C's own conversion has it; codes of 8 bits lie within half a step. */
static void check_storing(int dim) {
    float *row = numbers(dim);
    const float kinds[] = {0, -0.0f, 1e-9f, 0x1p-25f, 0x1.8p-24f, 0x1p-14f, 0x1.ffcp-15f, 65504, 65519, 1, 0x1.002p0f};
    for (int d = 0; d < dim; d++) row[d] *= kinds[d % COUNT(kinds)];
    uint16_t *halves = malloc(dim * sizeof *halves);
    put_row(row, dim, halves, 1, LANES, NULL, 0, FP16);
    int8_t *codes = malloc(dim);
    float scales[2] = {0};
    put_row(row, dim, codes, 1, LANES, scales, 1, INT8);
    for (int d = 0; d < dim; d++) {
        float wide[LANES];
        uint16_t lanes[LANES] = {halves[d]};
        for (int lane = 0; lane < LANES; lane += WIDTH) store(wide + lane, from_fp16(lanes + lane));
        check(wide[0] == (float)(_Float16)row[d], "a number in fp16", dim);
        check(fabsf(codes[d] * scales[1] - row[d]) <= 0.51f * scales[1], "a code", dim);
    }
    const float wild[] = {INFINITY, -INFINITY, NAN, 1e38f};
    for (int at = 0; at < COUNT(wild); at++) { /* whatever is stored is a number: it must not reach other rows */
        row[dim / 2] = wild[at];
        put_row(row, dim, halves, 1, LANES, NULL, 0, FP16);
        check((halves[dim / 2] & 0x7c00) != 0x7c00, "a number", dim);
        put_row(row, dim, codes, 1, LANES, scales, 1, INT8);
        check(isfinite(scales[1]), "a scale", dim);
    }
    free(row), free(halves), free(codes);
}

/* Passes of every number of rows up to `most` after a text that grows to `capacity` slots; then rows are moved. */
static void check_passes(struct shape shape, int most, int capacity, int threads) {
    struct model model = model_of(shape);
    struct engine *engine = draftwood_open(&model, most, threads);
    check(engine != NULL, "open", shape.hidden);
    struct cache cache = cache_of(shape, capacity), near = near_of(shape, capacity);
    const size_t heads = (size_t)shape.layers * shape.kv_heads;
    const int top = shape.vocab < 8 ? shape.vocab : 8;
    for (int rows = 1, length = 0; rows <= most && length + rows <= capacity; length += rows, rows++) {
        const int columns = rows;
        int64_t *tokens = malloc(rows * sizeof *tokens), *positions = malloc(rows * sizeof *positions);
        int64_t *outputs = malloc(rows * sizeof *outputs), *ids = malloc((size_t)rows * top * sizeof *ids);
        uint8_t *mask = calloc((size_t)rows * columns, 1);
        for (int row = 0; row < rows; row++) {
            tokens[row] = row % 2 ? shape.vocab - 1 : 0, outputs[row] = rows - 1 - row;
            positions[row] = length + row < shape.positions ? length + row : shape.positions - 1;
            for (int column = 0; column <= row; column++) mask[row * columns + column] = rows % 3 || column == row;
            if (!length) mask[row * columns] = 0; /* it sees nothing, not even itself */
        }
        float *logits = malloc((size_t)rows * shape.vocab * sizeof(float));
        float *logprobs = malloc((size_t)rows * top * sizeof(float)), *accepted = malloc(rows * sizeof(float));
        struct pass pass = {rows, rows, length, length, columns, top, tokens, positions, outputs, mask, cache, logits,
                            shape.blocks ? accepted : NULL, logprobs, ids};
        pass.near = near;
        float *given = numbers((size_t)rows * (shape.reads + 1) * shape.hidden);
        float *states = calloc((size_t)rows * shape.hidden, sizeof *states);
        for (int row = 0; row < rows; row++) /* of every other pass the states are the draft's own */
            for (int k = 0; k < (rows % 2 ? shape.reads : 0) * shape.hidden; k++)
                given[(size_t)row * (shape.reads + 1) * shape.hidden + k] = 0;
        if (shape.reads) check(draftwood_forward(engine, &pass) == 7, "no states", rows), pass.given = given;
        pass.states = shape.reads && rows % 3 ? states : NULL;
        int64_t *drawn = malloc(sizeof *drawn), *likely = malloc(sizeof *likely);
        double *sums = malloc((shape.vocab + RUN - 1) / RUN * sizeof *sums), *chances = malloc(sizeof *chances);
        struct draw *draw = malloc(sizeof *draw);
        *draw = (struct draw){0.7, 1e-4, 0, sums, chances, likely, 0, 1};
        *drawn = rows - 1;
        pass.draws = draw, pass.draw_outputs = drawn, pass.drawn = 1;
        check(draftwood_forward(engine, &pass) == 0, "forward", rows);
        const float *last = logits + (size_t)(rows - 1) * shape.vocab;
        const double total = draw->total;
        float peak;
        check(draftwood_softmax(last, shape.vocab, 0.7, sums, &peak) == total && draw->count >= 1, "a draw", rows);
        for (int sign = 0; sign < 2; sign++) {
            *drawn = sign ? -1 : rows;
            check(draftwood_forward(engine, &pass) == 4, "a draw of no row", rows);
        }
        pass.drawn = 0;
        for (int k = 0; pass.states && k < rows * shape.hidden; k++) check(states[k] != 0, "a state", rows);
        free(drawn), free(likely), free(sums), free(chances), free(draw);
        for (int at = 0; at < rows * shape.vocab; at++) check(isfinite(logits[at]), "logits", rows);
        for (int row = 0; row < rows; row++)
            for (int at = 0; at < top; at++) {
                const int64_t id = ids[row * top + at];
                check(id >= 0 && id < shape.vocab, "ranked", rows);
                check(!at || logits[row * shape.vocab + id] <= logits[row * shape.vocab + ids[row * top + at - 1]],
                      "order", rows);
            }
        const int64_t token = tokens[0], position = positions[0], output = outputs[0];
        for (int sign = 0; sign < 2; sign++) { /* what the kernels refuse themselves */
            tokens[0] = sign ? -1 : shape.vocab;
            check(draftwood_forward(engine, &pass) == 2, "a token", rows);
            tokens[0] = token, positions[0] = sign ? -1 : shape.positions;
            check(draftwood_forward(engine, &pass) == 3, "a position", rows);
            positions[0] = position, outputs[0] = sign ? -1 : rows;
            check(draftwood_forward(engine, &pass) == 4, "an output", rows);
            outputs[0] = output;
        }
        int32_t *first_panel = (int32_t *)near.panels;
        if (length >= shape.window + LANES) *first_panel = -1; /* no window of later rows reaches it */
        free(tokens), free(positions), free(outputs), free(ids), free(mask);
        free(logits), free(logprobs), free(accepted), free(given), free(states);
    }
    int64_t slots[] = {2, 0, capacity - 1};
    float *before = numbers_of_slots(&cache, shape, slots, 3);
    const int64_t behind[] = {1, 2, 3};
    const struct moved moved = {cache, slots, behind, 3, shape.layers}, none = {cache, slots, slots, 0, shape.layers};
    check(!draftwood_move(engine, &moved, 1), "move", capacity);
    float *after = numbers_of_slots(&cache, shape, behind, 3);
    check(!memcmp(before, after, 3 * 2 * heads * (shape.head_dim + 1) * sizeof(float)), "moved rows", capacity);
    check(!draftwood_move(engine, &none, 1), "nothing to move", capacity);
    draftwood_close(engine);
    free(before), free(after), free_cache(cache), free_cache(near), free_model(model);
}

int main(void) {
    check(draftwood_interface() == INTERFACE && draftwood_instructions() != NULL, "interface", 0);
    for (int size = 0; size < COUNT(SIZES); size++)
        for (int kind = 0; kind < KINDS; kind++)
            for (int at = 0; at < COUNT(TEMPERATURES); at++) check_sampling(SIZES[size], kind, TEMPERATURES[at]);
    for (int format = FP32; format <= INT4_K; format++)
        for (int size = 0; size < 8; size++)
            for (int rows = 1; rows <= 33; rows += rows < 9 ? 1 : 8) {
                const int block = has_superblocks(format) ? SUPERBLOCK : CODE_BLOCK;
                check_linear(SIZES[size], format < INT8 ? 1 + 9 * size : block * (size + 1), rows, format);
            }
    const float sizes[] = {0, 1e-40f, 1e-6f, 1e-5f, 1, 60000, 1e30f};
    for (int size = 0; size < 8; size++)
        for (int blocks = 1; blocks <= 3; blocks++)
            for (int at = 0; at < COUNT(sizes); at++) check_rounding(SIZES[size], blocks, sizes[at], at % 2);
    const struct shape shapes[] = {
        {1, 2, 1, 1, 1, 1, 2, 1, 0, FP32, 1, 0, FP32},       {17, 10, 7, 2, 5, 5, 2, 40, 1, FP32, 1, 1, INT8},
        {33, 34, 18, 2, 6, 2, 18, 300, 2, FP16, 7, 1, FP16}, {16, 32, 16, 1, 8, 1, 16, 300, 0, BF16, 8, 0, FP16},
        {15, 64, 64, 2, 4, 2, 16, 300, 3, INT8, 8, 1, INT8}, {31, 64, 32, 1, 32, 1, 2, 300, 0, INT4, 1, 0, FP16},
        {15, 64, 64, 2, 4, 2, 16, 300, 3, INT6, 8, 1, INT8}, {31, 64, 32, 1, 32, 1, 2, 300, 0, INT5, 1, 0, FP16},
        {33, 34, 18, 2, 6, 2, 18, 300, 0, FP16, 7, 0, INT8}, {15, 64, 64, 2, 4, 2, 16, 300, 0, INT8, 8, 0, FP32},
        {33, 34, 18, 2, 6, 2, 18, 300, 0, FP32, 7, 1, FP32, 19}, {15, 64, 64, 2, 4, 2, 16, 300, 0, INT4, 8, 1, INT8, 1},
        {33, 34, 18, 2, 6, 2, 18, 300, 0, BF16, 7, 0, FP32, 0, 3}, {15, 64, 64, 1, 4, 2, 16, 300, 0, INT8, 8, 0, FP16, 0, 2},
        {31, 256, 256, 1, 16, 4, 16, 300, 0, INT5_K, 8, 1, FP16},
    };
    for (int at = 0; at < COUNT(shapes); at++)
        for (int threads = 1; threads <= 3; threads++) check_passes(shapes[at], 17, at ? 160 : 16, threads);
    check_passes(shapes[3], 33, 640, 2); /* wider than a tile of matrix registers */
    for (int size = LANES; size <= 4 * LANES; size += LANES) check_acceptance(size);
    for (int size = 1; size <= 70; size += 3) check_storing(size);
    const struct model headed = {.heads = 1 << 17};
    check(queries_at_once(&headed, 1 << 14, 2) == MOST_QUERIES, "heads of all rows", headed.heads);
    struct model model = model_of(shapes[0]);
    for (int more = 0; more < 2; more++) { /* the most layers, and one more; the most threads, and more */
        model.layers = (MOST_PHASES - PHASES_BESIDE) / PHASES_OF_LAYER + more;
        struct engine *engine = draftwood_open(&model, 1, MOST_THREADS * (1 + more));
        check(!engine == more, "layers", model.layers);
        if (engine) draftwood_close(engine);
    }
    model.layers = 1;
    struct engine *engine = draftwood_open(&model, 1, 100 * MOST_THREADS);
    check(engine && engine->team->threads == MOST_THREADS, "threads", MOST_THREADS);
    draftwood_close(engine);
    free_model(model);
    printf("checked %d facts\n", checks);
    return 0;
}
