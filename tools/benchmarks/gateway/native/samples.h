/* All measured durations, so that quantiles are exact. */
#ifndef SAMPLES_H
#define SAMPLES_H

#include <stddef.h>
#include <stdint.h>

struct samples {
    int64_t *values; /* nanoseconds */
    size_t size, capacity;
};

void samples_add(struct samples *samples, int64_t value);

/* Prints `"NAME": {"p50": ..., ...}` in milliseconds; null without samples. Sorts the samples. */
void samples_print(struct samples *samples, const char *name);

#endif
