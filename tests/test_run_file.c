/* The run file: written and read back, followed while it grows, left by a kill, refused with the right words. */
#include <fcntl.h>
#include <hdf5.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "store/run_file.h"
#include "store/run_reader.h"

enum { V = 1000, RANKS = 3, PHASES = 2, PROMPT = 5 };

static char directory[] = "/tmp/k3_run_file_XXXXXX";
static char path[256], path2[256];
static const char *const phase_names[PHASES] = {"attention", "head"};
static const int64_t prompt[PROMPT] = {1, 2, 3, 999, 0};

static K3Config config(void)
{
  K3Config c = {.num_layers = 4, .hidden_size = 64, .vocab_size = V, .num_heads = 4, .q_lora_rank = 32,
                .kv_lora_rank = 32, .qk_nope_head_dim = 16, .qk_rope_head_dim = 8, .v_head_dim = 16,
                .kda_head_dim = 16, .kda_conv_kernel = 4, .kda_gate_lower_bound = -5.0, .num_experts = 8,
                .num_experts_per_token = 2, .num_shared_experts = 1, .latent_size = 32, .moe_intermediate_size = 32,
                .dense_intermediate_size = 128, .first_dense_layers = 1, .attn_res_block_size = 2,
                .rms_norm_eps = 1e-5, .low_rank_norm_eps = 1e-6, .situ_beta = 4.0, .situ_linear_beta = 25.0,
                .routed_scaling_factor = 1.0, .renormalize = 1, .max_context = 4096, .layer_types = {0, 0, 0, 1}};
  return c;
}

static K3RunInfo info(const K3Config *c)
{
  K3RunInfo i = {.version = "0.1", .model = "tiny.h5", .model_digest = 0xfedcba9876543210u, .config = c,
                 .ranks = RANKS, .backend = "host", .devices = "rank 0 here cpu\nrank 1 here cpu\n",
                 .command = "k3decode run tiny.h5", .start_time = "2026-01-01T00:00:00Z", .plan = "why: test\n",
                 .kind = "logits", .prompt = prompt, .prompt_count = PROMPT, .logits = K3_LOGITS_ALL,
                 .phase_names = phase_names, .phases = PHASES};
  return i;
}

/* The values of step n, all told apart. */
static K3Status append(K3RunFile *file, int n)
{
  static float logits[V];
  static double rank_ms[RANKS], phase_ms[RANKS * PHASES];
  for (int i = 0; i < V; i++) logits[i] = (float)(n * 10000 + i);
  for (int i = 0; i < RANKS; i++) rank_ms[i] = n + 0.1 * i;
  for (int i = 0; i < RANKS * PHASES; i++) phase_ms[i] = n + 0.01 * i;
  int64_t ids[4] = {n, n + 1, n + 2, n + 3};
  K3RunStep step = {n * 7 % V, logits, ids, logits, 0.5 * n, rank_ms, phase_ms};
  return k3_run_file_append(file, &step);
}

static K3RunFile *create(void)
{
  K3Config c = config();
  K3RunInfo i = info(&c);
  K3RunFile *file;
  if (k3_run_file_create(path, &i, &file) != K3_OK) fail_msg("%s", k3_status_message());
  return file;
}

/* Opens `path`, checks every row of `steps` steps. */
static void check_steps(int64_t steps, int unfinished, const char *ending)
{
  K3RunReader *run;
  if (k3_run_reader_open(path, &run) != K3_OK) fail_msg("%s", k3_status_message());
  assert_int_equal(run->steps, steps);
  assert_int_equal(run->unfinished, unfinished);
  assert_string_equal(run->ending, ending);
  int64_t *tokens = calloc((size_t)steps + 1, sizeof *tokens);
  double *ms = calloc((size_t)steps * RANKS * PHASES + 1, sizeof *ms);
  float *logits = calloc(V, sizeof *logits);
  assert_int_equal(k3_run_reader_tokens(run, tokens), K3_OK);
  for (int n = 0; n < steps; n++) assert_int_equal(tokens[n], n * 7 % V);
  assert_int_equal(k3_run_reader_step_ms(run, ms), K3_OK);
  for (int n = 0; n < steps; n++) assert_true(ms[n] == 0.5 * n);
  assert_int_equal(k3_run_reader_rank_step_ms(run, ms), K3_OK);
  for (int n = 0; n < steps; n++)
    for (int i = 0; i < RANKS; i++) assert_true(ms[n * RANKS + i] == n + 0.1 * i);
  assert_int_equal(k3_run_reader_phase_ms(run, ms), K3_OK);
  for (int n = 0; n < steps; n++)
    for (int i = 0; i < RANKS * PHASES; i++) assert_true(ms[n * RANKS * PHASES + i] == n + 0.01 * i);
  for (int n = 0; n < steps; n++) {
    assert_int_equal(k3_run_reader_logits(run, n, logits), K3_OK);
    for (int i = 0; i < V; i++) assert_true(logits[i] == (float)(n * 10000 + i));
  }
  assert_int_equal(k3_run_reader_logits(run, steps, logits), K3_ERR_INPUT);
  k3_status_clear();
  free(tokens);
  free(ms);
  free(logits);
  k3_run_reader_close(run);
}

/* A refusal: the status, the phrase, and whether a file stands at `where` afterwards. */
static void refuse(K3Status status, const char *phrase)
{
  assert_int_equal(status, K3_ERR_INPUT);
  if (!strstr(k3_status_message(), phrase)) fail_msg("\"%s\" lacks \"%s\"", k3_status_message(), phrase);
  k3_status_clear();
}

static void refuse_create(const char *where, const K3RunInfo *i, const char *phrase)
{
  K3RunFile *file;
  K3Status status = k3_run_file_create(where, i, &file);
  assert_null(file);
  refuse(status, phrase);
}

static int set_up(void **state)
{
  (void)state;
  unlink(path);
  unlink(path2);
  k3_status_clear();
  return 0;
}

static int child_status(pid_t child)
{
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  return status;
}

/* ---------------------------------------------------------------- what is written is read */

static void test_round_trip_all(void **state)
{
  (void)state;
  K3RunFile *file = create();
  for (int n = 0; n < 300; n++) assert_int_equal(append(file, n), K3_OK); /* across chunk borders */
  assert_int_equal(k3_run_file_close(file, "done"), K3_OK);
  check_steps(300, 0, "done");

  K3RunReader *run;
  K3Config c = config();
  assert_int_equal(k3_run_reader_open(path, &run), K3_OK);
  assert_memory_equal(&run->config, &c, sizeof c);
  assert_true(run->model_digest == 0xfedcba9876543210u);
  assert_int_equal(run->ranks, RANKS);
  assert_int_equal(run->phases, PHASES);
  assert_string_equal(run->phase_names[1], "head");
  assert_string_equal(run->plan, "why: test\n");
  assert_string_equal(run->devices, "rank 0 here cpu\nrank 1 here cpu\n");
  assert_string_equal(run->kind, "logits");
  assert_int_equal(run->prompt_count, PROMPT);
  assert_memory_equal(run->prompt, prompt, sizeof prompt);
  k3_run_reader_close(run);
}

static void test_round_trip_top_and_none(void **state)
{
  (void)state;
  K3Config c = config();
  for (int top = 0; top <= 4; top += 4) {
    K3RunInfo i = info(&c);
    K3RunFile *file;
    K3RunReader *run;
    int64_t ids[4];
    float logits[V];
    i.logits = top ? K3_LOGITS_TOP : K3_LOGITS_NONE;
    i.top = top;
    i.overwrite = 1;
    assert_int_equal(k3_run_file_create(path, &i, &file), K3_OK);
    for (int n = 0; n < 3; n++) assert_int_equal(append(file, n), K3_OK);
    assert_int_equal(k3_run_file_close(file, "done"), K3_OK);
    assert_int_equal(k3_run_reader_open(path, &run), K3_OK);
    assert_int_equal(run->top, top);
    if (top) {
      assert_int_equal(k3_run_reader_top(run, 2, ids, logits), K3_OK);
      assert_int_equal(ids[3], 5);
      assert_true(logits[3] == 20003.0f);
    }
    refuse(k3_run_reader_logits(run, 0, logits), "has no /decode/logits");
    k3_run_reader_close(run);
  }
}

static void test_one_part_of_a_wide_row(void **state)
{
  (void)state;
  enum { WIDE = 300000 }; /* two chunks a row */
  K3Config c = config();
  c.vocab_size = WIDE;
  K3RunInfo i = info(&c);
  i.ranks = 1;
  i.phases = 0;
  K3RunFile *file;
  K3RunReader *run;
  float *logits = calloc(WIDE, sizeof *logits);
  double ms = 1;
  assert_int_equal(k3_run_file_create(path, &i, &file), K3_OK);
  for (int n = 0; n < 3; n++) {
    logits[WIDE - 1] = (float)n;
    K3RunStep step = {.token = n, .logits = logits, .rank_step_ms = &ms};
    assert_int_equal(k3_run_file_append(file, &step), K3_OK);
  }
  assert_int_equal(k3_run_file_close(file, "done"), K3_OK);
  assert_int_equal(k3_run_reader_open(path, &run), K3_OK);
  assert_int_equal(k3_run_reader_logits(run, 2, logits), K3_OK);
  assert_true(logits[WIDE - 1] == 2.0f && logits[WIDE - 2] == 0.0f);
  k3_run_reader_close(run);
  free(logits);
}

static void test_zero_steps(void **state)
{
  (void)state;
  assert_int_equal(k3_run_file_close(create(), "stopped by signal 2 after 0 steps"), K3_OK);
  check_steps(0, 0, "stopped by signal 2 after 0 steps");
}

static void test_end_twice_then_append_is_refused(void **state)
{
  (void)state;
  K3RunFile *file = create();
  assert_int_equal(append(file, 0), K3_OK);
  assert_int_equal(k3_run_file_end(file, "stopped"), K3_OK);
  refuse(append(file, 1), "has ended after 1 steps");
  assert_int_equal(k3_run_file_end(file, "later"), K3_OK);
  assert_int_equal(k3_run_file_close(file, "later still"), K3_OK);
  assert_int_equal(k3_run_file_close(NULL, "x"), K3_OK);
  check_steps(1, 0, "stopped");
}

static void *end_from_thread(void *file)
{
  usleep(20000);
  return (void *)(intptr_t)k3_run_file_end(file, "stopped by signal 15");
}

static void test_end_from_another_thread(void **state)
{
  (void)state;
  K3RunFile *file = create();
  pthread_t thread;
  void *result;
  int n = 0;
  assert_int_equal(pthread_create(&thread, NULL, end_from_thread, file), 0);
  while (append(file, n) == K3_OK) n++;
  assert_int_equal(pthread_join(thread, &result), 0);
  assert_int_equal((intptr_t)result, K3_OK);
  refuse(K3_ERR_INPUT, "has ended");
  assert_int_equal(k3_run_file_close(file, "no"), K3_OK);
  check_steps(n, 0, "stopped by signal 15");
}

/* ---------------------------------------------------------------- while it is written */

/* The child writes 200 steps; this process follows them and checks each row it sees. */
static void test_reader_while_written(void **state)
{
  (void)state;
  int ready[2];
  char byte;
  assert_int_equal(pipe(ready), 0);
  pid_t child = fork();
  if (child == 0) {
    K3RunFile *file = create();
    if (append(file, 0) != K3_OK || write(ready[1], "x", 1) != 1) _exit(1);
    for (int n = 1; n < 200; n++) {
      if (append(file, n) != K3_OK) _exit(1);
      usleep(2000);
    }
    if (read(ready[0], &byte, 1) < 0) _exit(1); /* never comes: killed below */
    _exit(0);
  }
  assert_int_equal(read(ready[0], &byte, 1), 1);
  K3RunReader *run;
  if (k3_run_reader_open(path, &run) != K3_OK) fail_msg("%s", k3_status_message());
  assert_true(run->unfinished);
  assert_true(run->steps >= 1);
  int64_t seen = run->steps, looks = 0;
  float logits[V];
  while (run->steps < 200) {
    if (k3_run_reader_refresh(run) != K3_OK) fail_msg("%s", k3_status_message());
    assert_true(run->steps >= seen);
    seen = run->steps;
    int64_t n = seen - 1;
    if (k3_run_reader_logits(run, n, logits) != K3_OK) fail_msg("%s", k3_status_message());
    for (int i = 0; i < V; i++) assert_true(logits[i] == (float)(n * 10000 + i));
    if (++looks > 100000) fail_msg("the writer stands still at %lld", (long long)seen);
    usleep(500);
  }
  k3_run_reader_close(run);
  check_steps(200, 1, "running"); /* opened afresh while the writer lives */
  kill(child, SIGKILL);
  child_status(child);
  check_steps(200, 1, "running"); /* and after its death */
  close(ready[0]);
  close(ready[1]);
}

/* kill -9 at a random moment: the steps counted are whole. */
static void test_killed_writer_keeps_whole_steps(void **state)
{
  (void)state;
  unsigned seed = (unsigned)getpid();
  print_message("seed %u\n", seed);
  srand(seed);
  for (int round = 0; round < 10; round++) {
    unlink(path);
    int pipes[2], last = -1, n;
    assert_int_equal(pipe(pipes), 0);
    pid_t child = fork();
    if (child == 0) {
      K3RunFile *file = create();
      for (n = 0;; n++)
        if (append(file, n) != K3_OK || write(pipes[1], &n, sizeof n) != sizeof n) _exit(1);
    }
    close(pipes[1]); /* so that a child that ends early is seen, not waited for */
    assert_int_equal(read(pipes[0], &last, sizeof last), sizeof last);
    usleep((useconds_t)(rand() % 40000));
    kill(child, SIGKILL);
    child_status(child);
    while (read(pipes[0], &n, sizeof n) == sizeof n) last = n;
    close(pipes[0]);
    K3RunReader *run;
    if (k3_run_reader_open(path, &run) != K3_OK) fail_msg("%s", k3_status_message());
    int64_t steps = run->steps;
    k3_run_reader_close(run);
    assert_in_range(steps, last + 1, last + 2); /* the step under way may have got through */
    check_steps(steps, 1, "running");
  }
}

/* ---------------------------------------------------------------- refusals */

static void test_existing_output_is_refused(void **state)
{
  (void)state;
  K3Config c = config();
  K3RunInfo i = info(&c);
  assert_int_equal(k3_run_file_close(create(), "done"), K3_OK);
  refuse_create(path, &i, "exists; give another path, or --overwrite");
  check_steps(0, 0, "done"); /* untouched */
  i.overwrite = 1;
  K3RunFile *file;
  assert_int_equal(k3_run_file_create(path, &i, &file), K3_OK);
  assert_int_equal(append(file, 0), K3_OK);
  assert_int_equal(k3_run_file_close(file, "again"), K3_OK);
  check_steps(1, 0, "again");
}

static void test_overwrite_of_anything_else_is_refused(void **state)
{
  (void)state;
  K3Config c = config();
  K3RunInfo i = info(&c);
  i.overwrite = 1;
  FILE *other = fopen(path, "w");
  fputs("my thesis", other);
  fclose(other);
  refuse_create(path, &i, "is not a run file, and k3decode replaces nothing else");
  struct stat after;
  assert_int_equal(stat(path, &after), 0);
  assert_int_equal(after.st_size, 9);
  refuse_create("/dev/null", &i, "is not a regular file");
  refuse_create(directory, &i, "is a directory");
}

static void test_second_job_is_refused(void **state)
{
  (void)state;
  K3Config c = config();
  K3RunInfo i = info(&c);
  K3RunFile *file = create();
  assert_int_equal(append(file, 0), K3_OK);
  pid_t child = fork();
  if (child == 0) {
    K3RunFile *second;
    i.overwrite = 1;
    K3Status status = k3_run_file_create(path, &i, &second);
    _exit(status == K3_ERR_INPUT && strstr(k3_status_message(), "another process has it open") ? 0 : 1);
  }
  assert_int_equal(child_status(child), 0);
  assert_int_equal(append(file, 1), K3_OK);
  assert_int_equal(k3_run_file_close(file, "done"), K3_OK);
  check_steps(2, 0, "done");

  /* Held by a plain HDF5 writer. */
  child = fork();
  if (child == 0) {
    int held = open(path, O_RDWR);
    if (flock(held, LOCK_EX) != 0) _exit(1);
    pid_t grandchild = fork();
    if (grandchild == 0) {
      K3RunFile *second;
      close(held);
      i.overwrite = 1;
      K3Status status = k3_run_file_create(path, &i, &second);
      _exit(status == K3_ERR_INPUT && strstr(k3_status_message(), "another process has it open") ? 0 : 1);
    }
    int status;
    waitpid(grandchild, &status, 0);
    _exit(status != 0);
  }
  assert_int_equal(child_status(child), 0);
  check_steps(2, 0, "done");
}

static void test_dead_writers_file_may_be_overwritten(void **state)
{
  (void)state;
  pid_t child = fork();
  if (child == 0) {
    static K3RunFile *file; /* static: no leak in valgrind's eyes */
    file = create();
    append(file, 0);
    kill(getpid(), SIGKILL);
  }
  child_status(child);
  check_steps(1, 1, "running");
  K3Config c = config();
  K3RunInfo i = info(&c);
  i.overwrite = 1;
  K3RunFile *file;
  if (k3_run_file_create(path, &i, &file) != K3_OK) fail_msg("%s", k3_status_message());
  assert_int_equal(k3_run_file_close(file, "done"), K3_OK);
  check_steps(0, 0, "done");
}

static void test_bad_places_are_refused(void **state)
{
  (void)state;
  K3Config c = config();
  K3RunInfo i = info(&c);
  char where[300];
  snprintf(where, sizeof where, "%s/none/run.h5", directory);
  refuse_create(where, &i, "no such directory");
  refuse_create("", &i, "the path is empty");
  i.logits = K3_LOGITS_TOP;
  i.top = 0;
  refuse_create(path, &i, "--logits top:0, wanted 1 to the vocabulary's 1000");
  i.top = V + 1;
  refuse_create(path, &i, "--logits top:1001");
  assert_int_not_equal(access(path, F_OK), 0);
}

static void test_unwritable_directory_is_refused(void **state)
{
  (void)state;
  pid_t child = fork();
  if (child == 0) { /* root may write everywhere, so become nobody */
    if (geteuid() == 0 && seteuid(65534) != 0) _exit(77);
    K3Config c = config();
    K3RunInfo i = info(&c);
    K3RunFile *file;
    K3Status status = k3_run_file_create("/usr/k3_run.h5", &i, &file);
    _exit(status == K3_ERR_INPUT && strstr(k3_status_message(), "cannot be written: Permission denied") ? 0 : 1);
  }
  int status = child_status(child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) skip();
  assert_int_equal(status, 0);
}

/* A limit on file size stands for a full disk: at creation nothing is left, later the whole steps are. */
static void test_full_disk_at_creation_leaves_nothing(void **state)
{
  (void)state;
  pid_t child = fork();
  if (child == 0) {
    struct rlimit limit = {1000, 1000};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    K3Config c = config();
    K3RunInfo i = info(&c);
    K3RunFile *file;
    K3Status status = k3_run_file_create(path, &i, &file);
    fprintf(stderr, "%s\n", k3_status_message());
    exit(status == K3_ERR_INPUT && strstr(k3_status_message(), "File too large") ? 0 : 1);
  }
  assert_int_equal(child_status(child), 0);
  assert_int_not_equal(access(path, F_OK), 0);
}

static void test_full_disk_later_keeps_whole_steps(void **state)
{
  (void)state;
  int pipes[2], whole = -1;
  assert_int_equal(pipe(pipes), 0);
  pid_t child = fork();
  if (child == 0) {
    struct rlimit limit = {400000, 400000};
    signal(SIGXFSZ, SIG_IGN);
    K3RunFile *file = create();
    setrlimit(RLIMIT_FSIZE, &limit);
    int n = 0;
    while (n < 1000 && append(file, n) == K3_OK) n++;
    int good = strstr(k3_status_message(), "the steps before it are kept") != NULL;
    fprintf(stderr, "%s\n", k3_status_message());
    k3_run_file_close(file, "disk full");
    if (write(pipes[1], &n, sizeof n) != sizeof n) exit(1);
    exit(good && n < 1000 ? 0 : 1);
  }
  assert_int_equal(child_status(child), 0);
  assert_int_equal(read(pipes[0], &whole, sizeof whole), sizeof whole);
  close(pipes[0]);
  close(pipes[1]);
  K3RunReader *run;
  if (k3_run_reader_open(path, &run) != K3_OK) fail_msg("%s", k3_status_message());
  print_message("%d whole steps, ending \"%s\", unfinished %d\n", whole, run->ending, run->unfinished);
  int unfinished = run->unfinished;
  char ending[64];
  snprintf(ending, sizeof ending, "%s", run->ending);
  k3_run_reader_close(run);
  check_steps(whole, unfinished, ending);
}

static void test_missing_row_is_refused(void **state)
{
  (void)state;
  K3RunFile *file = create();
  double ms[RANKS * PHASES] = {0};
  K3RunStep step = {.token = 1, .rank_step_ms = ms, .phase_ms = ms};
  refuse(k3_run_file_append(file, &step), "step 0 brings no /decode/logits");
  refuse(append(file, 0), "an earlier step could not be written");
  assert_int_equal(k3_run_file_close(file, "failed"), K3_OK);
  check_steps(0, 0, "failed");
}

/* ---------------------------------------------------------------- files that are no run files */

static void refuse_open(const char *where, const char *phrase)
{
  K3RunReader *run;
  K3Status status = k3_run_reader_open(where, &run);
  assert_null(run);
  refuse(status, phrase);
}

/* Deletes or changes one thing in a good file. */
static void spoil(const char *name, int is_attribute, const char *phrase)
{
  unlink(path);
  k3_run_file_close(create(), "done");
  hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT);
  assert_true(file >= 0);
  if (is_attribute)
    assert_true(H5Adelete(file, name) >= 0);
  else
    assert_true(H5Ldelete(file, name, H5P_DEFAULT) >= 0);
  H5Fclose(file);
  refuse_open(path, phrase);
}

static void test_bad_run_files_are_refused(void **state)
{
  (void)state;
  refuse_open("/nowhere/run.h5", "cannot be read: No such file");
  FILE *other = fopen(path, "w");
  fputs("not HDF5 at all, but longer than the eight bytes of a signature", other);
  fclose(other);
  refuse_open(path, "no HDF5 file");
  spoil("format", 1, "not a run file");
  spoil("format_version", 1, "attribute /:format_version is missing");
  spoil("kind", 1, "root attribute kind is missing");
  spoil("/decode/token_ids", 0, "dataset /decode/token_ids is missing");
  spoil("/decode/steps", 0, "dataset /decode/steps is missing");
  spoil("/decode/logits", 0, "dataset /decode/logits is missing");
  spoil("/timings/phase_ms", 0, "dataset /timings/phase_ms is missing");
  spoil("/config", 0, "group /config is missing");
  spoil("/ending", 0, "dataset /ending is missing");

  unlink(path); /* truncated */
  K3RunFile *file = create();
  for (int n = 0; n < 20; n++) append(file, n);
  k3_run_file_close(file, "done");
  struct stat size;
  assert_int_equal(stat(path, &size), 0);
  assert_int_equal(truncate(path, size.st_size / 2), 0);
  refuse_open(path, "truncated");

  unlink(path); /* more steps claimed than rows */
  k3_run_file_close(create(), "done");
  hid_t h5 = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT), steps = H5Dopen2(h5, "/decode/steps", H5P_DEFAULT);
  uint64_t many = 7;
  assert_true(H5Dwrite(steps, H5T_NATIVE_UINT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, &many) >= 0);
  H5Dclose(steps);
  H5Fclose(h5);
  refuse_open(path, "fewer than the 7 of /decode/steps");
}

static void test_kinds_are_recognised(void **state)
{
  (void)state;
  assert_int_equal(k3_run_reader_recognise("/nowhere"), K3_FILE_UNREADABLE);
  assert_int_equal(k3_run_reader_recognise(directory), K3_FILE_UNREADABLE);
  FILE *other = fopen(path2, "w");
  fputs("x", other);
  fclose(other);
  assert_int_equal(k3_run_reader_recognise(path2), K3_FILE_NOT_HDF5);
  k3_run_file_close(create(), "done");
  assert_int_equal(k3_run_reader_recognise(path), K3_FILE_RUN);
  unlink(path2);
  hid_t h5 = H5Fcreate(path2, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
  H5Fclose(h5);
  assert_int_equal(k3_run_reader_recognise(path2), K3_FILE_FOREIGN);
  assert_string_equal(k3_status_message(), "");
  assert_int_equal(H5Fget_obj_count((hid_t)H5F_OBJ_ALL, H5F_OBJ_ALL), 0); /* nothing above left an id open */
}

int main(void)
{
  if (!mkdtemp(directory)) return 99;
  snprintf(path, sizeof path, "%s/run.h5", directory);
  snprintf(path2, sizeof path2, "%s/other.h5", directory);
  const struct CMUnitTest tests[] = {
    cmocka_unit_test_setup(test_round_trip_all, set_up),
    cmocka_unit_test_setup(test_round_trip_top_and_none, set_up),
    cmocka_unit_test_setup(test_one_part_of_a_wide_row, set_up),
    cmocka_unit_test_setup(test_zero_steps, set_up),
    cmocka_unit_test_setup(test_end_twice_then_append_is_refused, set_up),
    cmocka_unit_test_setup(test_end_from_another_thread, set_up),
    cmocka_unit_test_setup(test_reader_while_written, set_up),
    cmocka_unit_test_setup(test_killed_writer_keeps_whole_steps, set_up),
    cmocka_unit_test_setup(test_existing_output_is_refused, set_up),
    cmocka_unit_test_setup(test_overwrite_of_anything_else_is_refused, set_up),
    cmocka_unit_test_setup(test_second_job_is_refused, set_up),
    cmocka_unit_test_setup(test_dead_writers_file_may_be_overwritten, set_up),
    cmocka_unit_test_setup(test_bad_places_are_refused, set_up),
    cmocka_unit_test_setup(test_unwritable_directory_is_refused, set_up),
    cmocka_unit_test_setup(test_full_disk_at_creation_leaves_nothing, set_up),
    cmocka_unit_test_setup(test_full_disk_later_keeps_whole_steps, set_up),
    cmocka_unit_test_setup(test_missing_row_is_refused, set_up),
    cmocka_unit_test_setup(test_bad_run_files_are_refused, set_up),
    cmocka_unit_test_setup(test_kinds_are_recognised, set_up),
  };
  int failures = cmocka_run_group_tests(tests, NULL, NULL);
  unlink(path);
  unlink(path2);
  rmdir(directory);
  return failures != 0;
}
