/* Units of attention: how the queries of a pass are divided among threads. */
#pragma once
#include "engine.h"
#include "inputs.h"

/* How many of the queries of a kv head a unit has at most: each thread gets as many units, where fewer than twice the
 * least number suffice, or two units of a tile instead of one are worth another phase. */
static int queries_of_unit(const struct engine *engine, int rows, int panels) {
    const struct model *model = &engine->model;
    const int threads = engine->team->threads, wanted = queries_at_once(model, rows, threads);
    const int most = wanted < engine->most_queries ? wanted : engine->most_queries; /* there is room for */
    const int queries = rows * (model->heads / model->kv_heads);
    const int least = (queries + most - 1) / most;
    const int halves = least == 1 && queries > MOST_ROWS && queries * panels >= LEAST_SHARED;
    for (int units = least; units < 2 * least + halves; units++)
        if (units * model->kv_heads % threads == 0) return (queries + units - 1) / units;
    return most;
}

/* Cut the queries of a pass, `group` for each row, into units of rows that see the same. Where threads would be left
 * without a unit, or wait for the last one, units have parts. */
static void cut(struct engine *engine, int rows) {
    const struct model *model = &engine->model;
    const int group = model->heads / model->kv_heads, threads = engine->team->threads;
    const int panels = engine->mask.panels, most = queries_of_unit(engine, rows, panels);
    int count = most, first = 0;
    engine->num_units = 0;
    for (int query = 0; query < rows * group; query++, count++) {
        const int row = query / group;
        if (count < most && query % group) continue;
        if (count < most && similar_masks(&engine->mask, first, row)) {
            join_runs(&engine->mask, first, row);
            continue;
        }
        engine->units[engine->num_units++] = query;
        count = 0, first = row;
    }
    engine->units[engine->num_units] = rows * group;
    const int units = model->kv_heads * engine->num_units, wanted = (threads * PARTS_OF_SCORES + units - 1) / units;
    const int held = (int64_t)rows * model->heads <= threads * engine->most_queries; /* all scores at a time */
    const int few = units % threads && units < threads * SHARES && held;
    engine->parts = !few || panels < 2 * LEAST_PART ? 1 : wanted < panels / LEAST_PART ? wanted : panels / LEAST_PART;
}

/* A unit of a layer's attention. scores: room of this thread; where there are parts, every unit has its own. */
static struct unit unit_of(const struct engine *engine, const struct pass *pass, int layer, int index, float *scores) {
    const struct model *model = &engine->model;
    const int dim = model->head_dim, group = model->heads / model->kv_heads;
    const int head = index % model->kv_heads, *first = engine->units + index / model->kv_heads;
    struct unit unit = {&engine->mask, cache_of_layer(model, model->layer + layer, pass, head)};
    unit.runs = engine->mask.runs + (size_t)(*first / group) * engine->mask.room;
    unit.num_runs = engine->mask.counts[*first / group];
    unit.head_dim = dim;
    unit.count = first[1] - first[0];
    unit.stride = odd_lines(engine->capacity);
    unit.scores = engine->parts == 1 ? scores : engine->scores + (head * pass->rows * group + *first) * unit.stride;
    const int local = model->layer[layer].local;
    int nearest = local ? INT32_MAX : 0;
    unit.queries = queries_of(engine, pass->rows, head) + (size_t)*first * dim;
    for (int r = 0; r < unit.count; r++) {
        const int row = (*first + r) / group, at = (head * group + (*first + r) % group) * dim;
        unit.rows[r] = row;
        unit.nearest[r] = local ? engine->mask.nearest[row] : 0;
        if (unit.nearest[r] < nearest) nearest = unit.nearest[r];
        unit.outputs[r] = engine->attended.values + (size_t)row * engine->attended.stride + at;
    }
    unit.least = nearest / LANES;
    return unit;
}

/* Whether a thread computes all of a kv head's attention: then it may also write the head's keys and values before. */
static int units_are_heads(const struct engine *engine) { return engine->num_units == 1 && engine->parts == 1; }

/* Whether attention rounds its outputs for the next matrix, if they are rounded at all. */
static int rounds_outputs(const struct engine *engine, const struct layer *layer) {
    return layer->output.format < BF16 || (engine->parts == 1 && engine->model.head_dim % ROUNDED == 0);
}

/* A whole unit of a layer's attention. */
static void attend_unit(const struct engine *engine, const struct pass *pass, int index, int taken, float *scores) {
    const struct unit unit = unit_of(engine, pass, index, taken, scores);
    const struct layer *layer = &engine->model.layer[index];
    attend(&unit);
    for (int r = 0; rounds_outputs(engine, layer) && r < unit.count; r++) {
        const int from = (int)(unit.outputs[r] - engine->attended.values) - unit.rows[r] * engine->attended.stride;
        round_inputs(&engine->attended, unit.rows[r], from, from + unit.head_dim, &layer->output);
    }
}

/* Attention of a layer: a thread takes a unit at a time. Where these are too few, it takes the scores of a part of the
 * cache, and afterwards some numbers of the outputs. Each score and each output is the same sum either way. */
static void attention(struct cursor *cursor, struct engine *engine, const struct pass *pass, int layer, float *scores) {
    const int units = engine->model.kv_heads * engine->num_units, parts = engine->parts, panels = engine->mask.panels;
    if (parts == 1) {
        for (int taken; (taken = claim(cursor, units)) >= 0;) attend_unit(engine, pass, layer, taken, scores);
        return;
    }
    for (int taken; (taken = claim(cursor, units * parts)) >= 0;) {
        const struct unit unit = unit_of(engine, pass, layer, taken / parts, scores);
        const int part = taken % parts;
        const int read = panels - unit.least; /* panels, of which each part has a share */
        score(&unit, unit.least + read * part / parts, unit.least + read * (part + 1) / parts,
              engine->peaks + taken * engine->most_queries);
    }
    const int values = panels_of(engine->model.head_dim), pairs = (values + MOST_PANELS - 1) / MOST_PANELS;
    const int step = units * pairs < engine->team->threads ? 1 : MOST_PANELS, mixes = (values + step - 1) / step;
    for (int taken; (taken = claim(cursor, units * mixes)) >= 0;) {
        const struct unit unit = unit_of(engine, pass, layer, taken / mixes, scores);
        const int first = taken % mixes * step;
        float peaks[MOST_QUERIES];
        for (int r = 0; r < unit.count; r++) {
            const float *of = engine->peaks + taken / mixes * parts * engine->most_queries + r;
            peaks[r] = *of;
            for (int part = 1; part < parts; part++)
                if (of[part * engine->most_queries] > peaks[r]) peaks[r] = of[part * engine->most_queries];
        }
        mix(&unit, first, first + step < values ? first + step : values, peaks);
    }
}
