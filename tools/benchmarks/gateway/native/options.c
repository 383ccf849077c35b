#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "load.h"

static const char USAGE[] =
    "load plain|streams|hold --port PORT [options]\n"
    "\n"
    "Sends chat requests to 127.0.0.1:PORT over keep-alive connections, one at a time on each,\n"
    "and prints one line of JSON. Nothing counts until each connection has had an answer.\n"
    "  plain    requests a second, latency\n"
    "  streams  chunks a second, time to the first event, delay added to each event\n"
    "  hold     opens the streams, prints the line, and holds them for SECONDS\n"
    "\n"
    "  --connections N   requests or streams at a time (1)\n"
    "  --seconds S       length of the measured time (5)\n"
    "  --body-bytes N    size of the request body (300)\n"
    "  --chunks N        events of a stream (64)\n"
    "  --gap-us N        microseconds between two events (0)\n"
    "  --key KEY         sent as a bearer token; several are used in turn\n"
    "  --header LINE     a further header of every request\n";

static const struct option LONG[] = {
    {"port", required_argument, NULL, 'p'},        {"connections", required_argument, NULL, 'c'},
    {"seconds", required_argument, NULL, 's'},     {"body-bytes", required_argument, NULL, 'b'},
    {"chunks", required_argument, NULL, 'n'},      {"gap-us", required_argument, NULL, 'g'},
    {"key", required_argument, NULL, 'k'},         {"header", required_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static void refuse(const char *why) {
    fprintf(stderr, "%s\n\n%s", why, USAGE);
    exit(2);
}

static enum mode read_mode(const char *word) {
    if (strcmp(word, "plain") == 0) return PLAIN;
    if (strcmp(word, "streams") == 0) return STREAMS;
    if (strcmp(word, "hold") != 0) refuse("the first word is plain, streams or hold");
    return HOLD;
}

struct options read_options(int count, char **arguments) {
    if (count < 2) refuse("what to do?");
    struct options options = {
        .mode = read_mode(arguments[1]),
        .connections = 1,
        .body_bytes = 300,
        .chunks = 64,
        .seconds = 5,
        .keys = calloc((size_t)count, sizeof(char *)),
        .headers = calloc((size_t)count, sizeof(char *)),
    };
    if (!options.keys || !options.headers) die("out of memory");
    int letter;
    while ((letter = getopt_long(count - 1, arguments + 1, "", LONG, NULL)) != -1) switch (letter) {
            case 'p': options.port = atoi(optarg); break;
            case 'c': options.connections = atoi(optarg); break;
            case 's': options.seconds = atof(optarg); break;
            case 'b': options.body_bytes = atoi(optarg); break;
            case 'n': options.chunks = atol(optarg); break;
            case 'g': options.gap_us = atol(optarg); break;
            case 'k': options.keys[options.key_count++] = optarg; break;
            case 'h': options.headers[options.header_count++] = optarg; break;
            default: refuse("an option that is not known");
        }
    if (options.port < 1) refuse("--port is missing");
    if (options.connections < 1) refuse("--connections is 1 or more");
    if (options.chunks < 1) refuse("--chunks is 1 or more");
    return options;
}

/* The prompt fills the body up to its size. */
static void append_body(struct buffer *text, const struct options *options) {
    static const char START[] =
        "{\"model\":\"mock\",\"messages\":[{\"role\":\"user\",\"content\":\"";
    char end[160];
    const char *stream = options->mode == PLAIN ? "false" : "true";
    int size = snprintf(end, sizeof end, "\"}],\"max_tokens\":%ld,\"stream\":%s,\"seed\":%ld}",
                        options->chunks, stream, options->gap_us);
    buffer_append(text, START, sizeof START - 1);
    for (int left = options->body_bytes - (int)(sizeof START - 1) - size; left > 0; left--)
        buffer_append(text, left % 6 ? "w" : " ", 1);
    buffer_append(text, end, (size_t)size);
}

static void append_line(struct buffer *text, const char *name, const char *value) {
    char line[4096];
    int size = snprintf(line, sizeof line, "%s%s\r\n", name, value);
    if (size >= (int)sizeof line) refuse("a header is too long");
    buffer_append(text, line, (size_t)size);
}

static struct request build_request(const struct options *options, const char *key) {
    struct buffer body = {0}, text = {0};
    char number[32];
    append_body(&body, options);
    append_line(&text, "POST /v1/chat/completions HTTP/1.1", "");
    append_line(&text, "Host: 127.0.0.1", "");
    append_line(&text, "Content-Type: application/json", "");
    append_line(&text, "Accept: */*", "");
    if (key) append_line(&text, "Authorization: Bearer ", key);
    for (int i = 0; i < options->header_count; i++) append_line(&text, options->headers[i], "");
    snprintf(number, sizeof number, "%zu", body.size);
    append_line(&text, "Content-Length: ", number);
    append_line(&text, "", "");
    buffer_append(&text, body.data, body.size);
    buffer_free(&body);
    return (struct request){text.data, text.size};
}

struct request *build_requests(const struct options *options) {
    int count = options->key_count ? options->key_count : 1;
    struct request *requests = calloc((size_t)count, sizeof *requests);
    if (!requests) die("out of memory");
    for (int i = 0; i < count; i++)
        requests[i] = build_request(options, options->key_count ? options->keys[i] : NULL);
    return requests;
}
