/* What the commands that decode share (run, sweep): options of ranks and backend, and opening a model on all ranks.
 * Layer: commands. Calls with a communicator are collective; they agree on failure, and the message is printed once. */
#ifndef K3_COMMANDS_SESSION_H
#define K3_COMMANDS_SESSION_H

#include <getopt.h>

#include "decode/backend.h"
#include "store/tuning_file.h"

/* Options by these letters; see k3_session_usage. */
typedef struct {
  const char *backend; /* "auto", "host", "cuda" */
  const char *tuning;  /* path of a tuning file; NULL: none */
  int64_t seed;        /* of the synthetic cache */
  int expert_groups, expert_bands, slice_rank, slice_world;
  K3CacheBand cache_band;
  K3AttentionArm attention;
  int graph, activations_f32;
  K3CacheType cache_type;
} K3SessionOptions;

#define K3_SESSION_DEFAULTS                  \
  {                                          \
    .backend = "auto", .seed = 1, .graph = 1 \
  }

/* Rows for getopt_long. */
#define K3_SESSION_LONG_OPTIONS                                                              \
  {"backend", required_argument, 0, 'b'}, {"seed", required_argument, 0, 's'},               \
      {"cache-band", required_argument, 0, 'k'}, {"expert-grid", required_argument, 0, 'e'}, \
      {"slice", required_argument, 0, 'r'}, {"activations", required_argument, 0, 'a'},      \
      {"cache", required_argument, 0, 't'}, {"tuning", required_argument, 0, 'u'},           \
  {                                                                                          \
    "graph", required_argument, 0, 'g'                                                       \
  }

extern const char k3_session_usage[];

/* One of the options above. Errors: K3_ERR_USAGE, also for any other letter. */
K3Status k3_session_parse(int letter, const char *value, K3SessionOptions *options);

/* What fits together only once the number of processes is known. Errors: K3_ERR_USAGE. */
K3Status k3_session_check(const K3SessionOptions *options, const K3Comm *comm);

/* "split", "unsplit" … Errors: K3_ERR_USAGE listing them; `option` begins the message. */
K3Status k3_session_parse_attention(const char *option, const char *value, K3AttentionArm *arm);

/* The tuning file of the options, NULL when there is none; k3_tuning_file_close releases it. Each rank reads it.
 * Errors: K3_ERR_INPUT. */
K3Status k3_session_read_tuning(const K3SessionOptions *options, K3Comm *comm, K3TuningFile **tuning);

/* All but capacity and start. tuning (may be NULL) outlives the backend. */
K3BackendOptions k3_session_backend_options(const K3SessionOptions *options, const K3TuningFile *tuning);

/* "k3decode …" as typed; the caller frees it. NULL: no memory. */
char *k3_session_join(int argc, char **argv);

/* All ranks must be started with the same words (the command's options; a model may have another path on another
 * host): otherwise they would decode nonsense, or wait for each other for ever. Errors: K3_ERR_USAGE with both. */
K3Status k3_session_same_words(K3Comm *comm, int count, char **words);

/* ISO 8601, UTC. Errors: K3_ERR_INPUT. */
K3Status k3_session_start_time(char text[32]);

int k3_session_same_file(const char *a, const char *b);

/* Opens `model` on all ranks, which must run one build of this program (another host may have another under the same path) and
 * see one model: a file replaced while the ranks start, or different on another host, would decode nonsense.
 * Errors: those of k3_source_open; K3_ERR_INPUT naming the rank and host that differ. */
K3Status k3_session_open_model(K3Comm *comm, const char *model, K3Source **source);

/* Plans for `ranks`, with the cache band given. Errors: those of k3_plan_make. */
K3Status k3_session_plan(const K3SessionOptions *options, K3CacheBand cache_band, K3Comm *comm, const K3Comm *ranks,
                         const K3Source *source, K3Plan *plan);

/* Opens the backend and checks that the memory will do. comm: of the processes; ranks: of the decode, or a slice's. */
K3Status k3_session_open_backend(const K3SessionOptions *options, K3Comm *comm, K3Comm *ranks, K3Source *source,
                                 const K3Plan *plan, const K3BackendOptions *backend_options, K3Backend **backend);

/* A line of each rank's device, on rank 0; the caller frees it. */
K3Status k3_session_gather_devices(const K3SessionOptions *options, K3Comm *comm, K3Backend *backend, char **devices);

/* Loads, with a progress bar on rank 0. */
K3Status k3_session_load(K3Comm *comm, K3Backend *backend);

#endif
