/* Finds the mock's time stamps in a stream of events that arrives in pieces of any size. */
#ifndef MARKS_H
#define MARKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TAIL_SIZE 64

struct marks {
    int digits; /* of the instant that is being read; -1 between instants */
    int64_t instant;
    long found;
    uint64_t size; /* bytes so far */
    char first, tail[TAIL_SIZE];
};

typedef void mark_sink(void *owner, int64_t instant);

void marks_start(struct marks *marks);
void marks_feed(struct marks *marks, const char *data, size_t size, mark_sink *sink, void *owner);

/* Whether the text so far ends with `ending`, white space aside. */
bool marks_end_with(const struct marks *marks, const char *ending);

#endif
