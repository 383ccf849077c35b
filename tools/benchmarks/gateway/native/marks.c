#define _GNU_SOURCE
#include "marks.h"

#include <ctype.h>
#include <string.h>

#define STAMP_DIGITS 20

void marks_start(struct marks *marks) { *marks = (struct marks){.digits = -1}; }

static void keep_tail(struct marks *marks, const char *data, size_t size) {
    if (!marks->size && size) marks->first = data[0];
    marks->size += size;
    if (size < TAIL_SIZE) {
        memmove(marks->tail, marks->tail + size, TAIL_SIZE - size);
        memcpy(marks->tail + TAIL_SIZE - size, data, size);
    } else {
        memcpy(marks->tail, data + size - TAIL_SIZE, TAIL_SIZE);
    }
}

void marks_feed(struct marks *marks, const char *data, size_t size, mark_sink *sink, void *owner) {
    const char *end = data + size;
    keep_tail(marks, data, size);
    while (data < end) {
        if (marks->digits < 0) {
            data = memchr(data, '@', (size_t)(end - data));
            if (!data) return;
            data++;
            marks->digits = 0;
            marks->instant = 0;
            continue;
        }
        if (!isdigit((unsigned char)*data)) {
            marks->digits = -1;
            continue;
        }
        marks->instant = marks->instant * 10 + (*data++ - '0');
        if (++marks->digits == STAMP_DIGITS) {
            marks->digits = -1;
            marks->found++;
            sink(owner, marks->instant);
        }
    }
}

bool marks_end_with(const struct marks *marks, const char *ending) {
    const char *end = marks->tail + TAIL_SIZE;
    size_t size = strlen(ending);
    while (end > marks->tail && isspace((unsigned char)end[-1])) end--;
    return (size_t)(end - marks->tail) >= size && memcmp(end - size, ending, size) == 0;
}
