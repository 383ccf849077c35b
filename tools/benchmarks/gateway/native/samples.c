#include "samples.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "net.h"

/* Enough for most runs, so that a run does not pause to allocate memory. */
#define FIRST_CAPACITY (1 << 20)
#define MS 1e-6

void samples_add(struct samples *samples, int64_t value) {
    if (samples->size == samples->capacity) {
        samples->capacity = samples->capacity ? 2 * samples->capacity : FIRST_CAPACITY;
        samples->values = realloc(samples->values, samples->capacity * sizeof *samples->values);
        if (!samples->values) die("out of memory");
    }
    samples->values[samples->size++] = value;
}

static int compare(const void *left, const void *right) {
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

/* The smallest value that at least `share` of all do not exceed. */
static double quantile(const struct samples *samples, double share) {
    double rank = ceil(share * (double)samples->size);
    return MS * (double)samples->values[rank < 1 ? 0 : (size_t)rank - 1];
}

void samples_print(struct samples *samples, const char *name) {
    if (!samples->size) {
        printf("\"%s\": null", name);
        return;
    }
    qsort(samples->values, samples->size, sizeof *samples->values, compare);
    printf("\"%s\": {\"p50\": %.4f, \"p99\": %.4f, \"p999\": %.4f, \"max\": %.4f}", name,
           quantile(samples, 0.5), quantile(samples, 0.99), quantile(samples, 0.999),
           quantile(samples, 1.0));
}
