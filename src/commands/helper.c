/* Starts the programs in Python that serve a command. See helper.h. Layer: commands. */
#include "commands/helper.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "config.h"

extern char **environ;

enum { MAX_WORDS = 512 };

/* dirname of this program, without links; "" when it cannot be told */
static void find_program(char folder[PATH_MAX])
{
  ssize_t length = readlink("/proc/self/exe", folder, PATH_MAX - 1);
  folder[length > 0 ? length : 0] = '\0';
  char *slash = strrchr(folder, '/');
  if (slash) *slash = '\0';
}

static int is_folder(const char *folder, const char *wanted)
{
  char real[PATH_MAX];
  return realpath(wanted, real) && strcmp(folder, real) == 0;
}

/* Where the helpers are: those of the source tree for a program that still lies in its build tree, else beside the
 * program (a moved installation), else where make install puts them. */
static K3Status find_helper(const char *name, char path[PATH_MAX])
{
  char folder[PATH_MAX], beside[PATH_MAX];
  const char *chosen = getenv("K3_HELPERS");
  find_program(folder);
  snprintf(beside, sizeof beside, "%.3000s/../libexec/k3decode", folder);
  const char *places[] = {K3_HELPER_DIR, NULL, NULL};
  if (chosen && chosen[0]) places[0] = chosen;
  else if (is_folder(folder, K3_BUILD_DIR) || is_folder(folder, K3_BUILD_DIR "/tests"))
    places[0] = K3_HELPER_SOURCE_DIR;
  else places[0] = beside, places[1] = K3_HELPER_DIR;
  for (int i = 0; places[i]; i++)
    if (snprintf(path, PATH_MAX, "%s/%s", places[i], name) < PATH_MAX && access(path, R_OK) == 0) return K3_OK;
  K3_FAIL(K3_ERR_INPUT,
          "the helper %s is not in %s: install k3decode whole (make install), or set K3_HELPERS to the directory", name,
          places[0]);
}

/* What a helper left in a temporary file, allocated; NULL: no memory. */
static char *take_text(FILE *file)
{
  long size = fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
  char *text = size >= 0 ? calloc((size_t)size + 1, 1) : NULL;
  rewind(file);
  if (text && fread(text, 1, (size_t)size, file) != (size_t)size) text[0] = '\0';
  return text;
}

/* Temporary files rather than pipes: no side can block the other. */
static K3Status start(const char *python, char *const *arguments, FILE *input, FILE *output, FILE *errors, pid_t *child)
{
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  sigset_t none;
  sigemptyset(&none); /* run blocks signals for its own thread: the helper must not inherit that */
  if (posix_spawn_file_actions_init(&actions) != 0) K3_FAIL(K3_ERR_INPUT, "no memory to start %s", python);
  if (posix_spawnattr_init(&attributes) != 0) {
    posix_spawn_file_actions_destroy(&actions);
    K3_FAIL(K3_ERR_INPUT, "no memory to start %s", python);
  }
  int error = posix_spawnattr_setsigmask(&attributes, &none);
  if (!error) error = posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  if (!error) error = posix_spawn_file_actions_adddup2(&actions, fileno(input), STDIN_FILENO);
  if (!error && output) error = posix_spawn_file_actions_adddup2(&actions, fileno(output), STDOUT_FILENO);
  if (!error) error = posix_spawn_file_actions_adddup2(&actions, fileno(errors), STDERR_FILENO);
  if (!error) error = posix_spawnp(child, python, &actions, &attributes, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error)
    K3_FAIL(K3_ERR_INPUT, "cannot start %s: %s; install Python 3 (Debian: python3), or set K3_PYTHON to one", python,
            strerror(error));
  return K3_OK;
}

/* Waits, and turns the helper's end into ours. */
static K3Status finish(const char *name, pid_t child, FILE *errors)
{
  int ended = 0;
  pid_t waited;
  while ((waited = waitpid(child, &ended, 0)) < 0 && errno == EINTR) continue;
  char *said = take_text(errors);
  if (!said) K3_FAIL(K3_ERR_INPUT, "no memory for the message of %s", name);
  size_t length = strlen(said);
  while (length > 0 && said[length - 1] == '\n') said[--length] = '\0';
  K3Status status = K3_OK;
  if (waited < 0)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: no exit status: %s", name, strerror(errno));
  else if (WIFSIGNALED(ended))
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s was ended by signal %d", name, WTERMSIG(ended));
  else if (WEXITSTATUS(ended) != 0)
    status = k3_status_fail(WEXITSTATUS(ended) == K3_ERR_USAGE ? K3_ERR_USAGE : K3_ERR_INPUT, __FILE__, __LINE__, "%s",
                            length ? said : "a helper failed and said nothing");
  else if (length) fprintf(stderr, "%s\n", said); /* a library's warning */
  free(said);
  return status;
}

K3Status k3_helper_run(const char *name, const char *const *words, const char *input, char **output)
{
  char path[PATH_MAX];
  K3_TRY(find_helper(name, path));
  const char *chosen = getenv("K3_PYTHON"), *python = chosen && chosen[0] ? chosen
                                                      : K3_PYTHON[0]      ? K3_PYTHON
                                                                          : "python3";
  const char *arguments[MAX_WORDS + 4] = {python, "-B", path}; /* -B: no compiled copies beside the helper */
  int count = 3;
  for (int i = 0; words[i]; i++) {
    if (i == MAX_WORDS) K3_FAIL(K3_ERR_USAGE, "more than %d words for %s", MAX_WORDS, name);
    arguments[count++] = words[i];
  }
  K3Status status = K3_OK;
  FILE *in = tmpfile(), *errors = tmpfile(), *out = output ? tmpfile() : NULL;
  pid_t child;
  if (!in || !errors || (output && !out))
    K3_FAIL_DONE(K3_ERR_INPUT, "no temporary file for %s: %s", name, strerror(errno));
  if (input && (fputs(input, in) < 0 || fflush(in) != 0))
    K3_FAIL_DONE(K3_ERR_INPUT, "no temporary file for %s: %s", name, strerror(errno));
  rewind(in);
  fflush(stdout); /* what was printed so far stands before what the helper prints */
  /* spawn takes char *const *, and does not write to the words */
  K3_TRY_DONE(start(python, (char *const *)(void *)arguments, in, out, errors, &child));
  K3_TRY_DONE(finish(name, child, errors));
  if (output && !(*output = take_text(out))) K3_FAIL_DONE(K3_ERR_INPUT, "no memory for the output of %s", name);
done:
  if (in) fclose(in);
  if (out) fclose(out);
  if (errors) fclose(errors);
  return status;
}
