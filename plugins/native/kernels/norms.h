/* RMS norms of rows and of heads. */
#pragma once
#include "engine.h"
#include "inputs.h"

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
