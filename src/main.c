/* k3decode: the command word, and the process's end. Layer: above commands.
 * Only this file ends the process (k3_comm_abort and the signal thread aside). */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands/commands.h"
#include "commands/session.h"
#include "commands/version.h"
#include "comm/comm.h"
#include "config.h"
#include "decode/interrupt.h"

static const char usage[] =
  "usage: k3decode COMMAND …\n"
  "\n"
  "Decodes Kimi K3 on many ranks, one to a GPU, from and to HDF5.\n"
  "\n"
  "  run MODEL      decode: under mpirun or srun (k3decode run --help)\n"
  "  sweep MODEL    time over depth, two arms interleaved, with its noise floor: likewise under mpirun\n"
  "  tune MODEL     time the attention kernels on this GPU; writes what run --tuning takes\n"
  "  synth RECIPE   write a synthetic model\n"
  "  import DIR     convert a published checkpoint to a model file\n"
  "  compare A B    parity of two run files\n"
  "  info FILE      what is in a model or run file\n"
  "  report FILE …  runs and sweeps as a page of figures and tables\n"
  "  text …         text to token ids and back, with a checkpoint's tokenizer\n"
  "\n"
  "  --help, --version\n"
  "\n"
  "Exit status: 0 done, 1 a comparison failed, 2 wrong usage, 3 bad input, 4 a device, MPI or NCCL failure.\n";

typedef K3Status (*Command)(int argc, char **argv, K3Comm *comm);

/* Commands of all ranks: they speak and end together, and heed signals. */
typedef K3Status (*RankCommand)(int argc, char **argv, K3Comm *comm, int *signal);

/* Commands of one process. */
static const struct {
  const char *name;
  Command command;
} commands[] = {
  {"synth", k3_command_synth},
  {"import", k3_command_import},
  {"compare", k3_command_compare},
  {"info", k3_command_info},
  {"report", k3_command_report},
  {"text", k3_command_text},
  {"tune", k3_command_tune},
};

/* Started by mpirun or srun with several ranks? Then MPI must start, for a refusal that ends them all. */
static int launched_by_mpi(void)
{
  static const char *const signs[] = {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"};
  for (size_t i = 0; i < sizeof signs / sizeof signs[0]; i++)
    if (getenv(signs[i])) return 1;
  return 0;
}

static int fail(K3Status status)
{
  fprintf(stderr, "k3decode: %s%s\n", k3_status_origin(), k3_status_message());
  return (int)status;
}

/* srun without an MPI plugin starts tasks that know nothing of each other: each would decode alone. */
static K3Status check_launcher(const char *tasks, const K3Comm *comm)
{
  if (comm->world == 1 && tasks && atoi(tasks) > 1)
    K3_FAIL(K3_ERR_USAGE, "srun started %s tasks, but MPI sees a world of one: use srun --mpi=pmix (srun --mpi=list shows what there is)", tasks);
  return K3_OK;
}

/* On failure the lowest failing rank says why, and all end. */
static K3Status check_start(K3Comm *comm, int decodes, char **argv)
{
  K3_TRY(k3_session_same_words(comm, 1, argv + 1)); /* the command: before anything that not every command does */
  K3Status status = k3_version_check_hdf5();
  if (status == K3_OK && decodes) status = k3_version_check_nccl();
  return k3_comm_agree(comm, status);
}

static int run(RankCommand command, int argc, char **argv)
{
  K3Comm *comm = NULL;
  int signal = 0;
  const char *tasks = launched_by_mpi() ? NULL : getenv("SLURM_STEP_NUM_TASKS"); /* asked before MPI sets its own */
  K3Status status = k3_interrupt_start();
  if (status == K3_OK) status = k3_comm_open_mpi(&argc, &argv, &comm);
  if (status != K3_OK) return fail(status);
  k3_status_set_origin(comm->rank, comm->world, comm->host);
  status = check_start(comm, 1, argv);
  if (status == K3_OK) status = k3_comm_agree(comm, check_launcher(tasks, comm));
  if (status == K3_OK) status = command(argc - 1, argv + 1, comm, &signal);
  comm->close(comm);
  return status != K3_OK ? (int)status : signal ? 128 + signal : 0;
}

static int other(Command command, int argc, char **argv)
{
  K3Comm *comm = NULL;
  K3Status status = launched_by_mpi() ? k3_comm_open_mpi(&argc, &argv, &comm) : k3_comm_open_local(0, 1, &comm);
  if (status != K3_OK) return fail(status);
  k3_status_set_origin(comm->rank, comm->world, comm->host);
  status = check_start(comm, 0, argv);
  if (status == K3_OK) {
    status = command(argc - 1, argv + 1, comm);
    if (status != K3_OK && comm->rank == 0) fail(status);
  }
  comm->close(comm);
  return (int)status;
}

static int command(int argc, char **argv)
{
  if (argc < 2) {
    fputs(usage, stderr);
    return K3_ERR_USAGE;
  }
  if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
    fputs(usage, stdout);
    return 0;
  }
  if (strcmp(argv[1], "--version") == 0) {
    k3_print_version();
    return 0;
  }
  K3Status status = k3_version_check_mpi();
  if (status != K3_OK) return fail(status);
  if (strcmp(argv[1], "run") == 0) return run(k3_command_run, argc, argv);
  if (strcmp(argv[1], "sweep") == 0) return run(k3_command_sweep, argc, argv);
  for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
    if (strcmp(argv[1], commands[i].name) == 0) return other(commands[i].command, argc, argv);
  fprintf(stderr, "k3decode: '%s' is no command\n\n%s", argv[1], usage);
  return K3_ERR_USAGE;
}

int main(int argc, char **argv)
{
  int status = command(argc, argv);
  if ((fflush(stdout) != 0 || ferror(stdout)) && status == 0) {
    fprintf(stderr, "k3decode: standard output could not be written: is its disk full?\n");
    return K3_ERR_INPUT;
  }
  return status;
}
