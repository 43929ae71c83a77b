/* `k3decode report FILE… --output PAGE`: runs and sweeps as figures and tables. Layer: commands.
 * Options and files are checked here, with the readers that info uses; the drawing is src/helpers/report.py, by matplotlib. */
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands/arguments.h"
#include "commands/commands.h"
#include "commands/helper.h"
#include "store/run_reader.h"
#include "store/sweep_file.h"

static const char usage[] =
    "usage: k3decode report FILE.h5 … --output PAGE.html [options]\n"
    "\n"
    "Figures and tables of run and sweep files: depth curve (sweeps), histogram of the step times, phases, and how far "
    "a step is\n"
    "from the time that its bytes need. Drawn by Python and matplotlib (Debian: python3-h5py, python3-matplotlib).\n"
    "\n"
    "  --output PAGE.html     a page that needs no other file, with the numbers as tables and each file's command;\n"
    "                         .svg, .png or .pdf: the figures alone\n"
    "  --bandwidth TBPS       memory rate that the bytes are compared with, TB/s (default 4.5: an H200)\n"
    "  --overwrite            replace PAGE\n"
    "  --help\n";

enum { MAX_FILES = 64 };

typedef struct {
  const char *output, *bandwidth;
  int overwrite, files;
} Options;

static K3Status check_output(const char *output)
{
  static const char *const endings[] = {".html", ".svg", ".png", ".pdf"};
  size_t length = strlen(output);
  for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++)
    if (length > strlen(endings[i]) && strcmp(output + length - strlen(endings[i]), endings[i]) == 0) return K3_OK;
  K3_FAIL(K3_ERR_USAGE, "report: --output %s: wanted a name that ends in .html, .svg, .png or .pdf", output);
}

static K3Status check_bandwidth(const char *text)
{
  char *end;
  double value = strtod(text, &end);
  if (end == text || *end || !isfinite(value) || !(value > 0) || value > 1e6)
    K3_FAIL(K3_ERR_USAGE, "report: --bandwidth %s: wanted a number of TB/s above 0", text);
  return K3_OK;
}

static K3Status parse(int argc, char **argv, Options *options, int *help)
{
  static const struct option names[] = {{"output", required_argument, NULL, 'o'},
                                        {"bandwidth", required_argument, NULL, 'b'},
                                        {"overwrite", no_argument, NULL, 'w'},
                                        {"help", no_argument, NULL, 'h'},
                                        {NULL, 0, NULL, 0}};
  *options = (Options){.bandwidth = "4.5"};
  *help = 0;
  optind = 0;
  int letter;
  while ((letter = getopt_long(argc, argv, ":o:h", names, NULL)) != -1) {
    switch (letter) {
    case 'o': options->output = optarg; break;
    case 'b': options->bandwidth = optarg; break;
    case 'w': options->overwrite = 1; break;
    case 'h': *help = 1; return K3_OK;
    default: return k3_refuse_option("report", letter, argv);
    }
  }
  options->files = argc - optind;
  if (options->files < 1)
    K3_FAIL(K3_ERR_USAGE, "report wants one run or sweep file or more (see k3decode report --help)");
  if (options->files > MAX_FILES)
    K3_FAIL(K3_ERR_USAGE, "report: %d files, at most %d in one page", options->files, MAX_FILES);
  if (!options->output) K3_FAIL(K3_ERR_USAGE, "report: --output PAGE.html is missing (see k3decode report --help)");
  K3_TRY(check_output(options->output));
  return check_bandwidth(options->bandwidth);
}

static K3Status check_file(const char *path)
{
  K3RunReader *run = NULL;
  K3SweepPage *sweep = NULL;
  K3Status status = K3_OK;
  switch (k3_run_reader_recognise(path)) {
  case K3_FILE_SWEEP: status = k3_sweep_file_read(path, &sweep); break;
  case K3_FILE_RUN:
  case K3_FILE_UNREADABLE:
  case K3_FILE_DAMAGED: status = k3_run_reader_open(path, &run); break; /* says how */
  default: K3_FAIL(K3_ERR_INPUT, "%s is neither a run file nor a sweep file; report draws those", path);
  }
  k3_run_reader_close(run);
  k3_sweep_page_close(sweep);
  return status;
}

K3Status k3_command_report(int argc, char **argv, K3Comm *comm)
{
  Options options;
  int help;
  K3_TRY(parse(argc, argv, &options, &help));
  if (help) {
    fputs(usage, stdout);
    return K3_OK;
  }
  if (comm && comm->world > 1)
    K3_FAIL(K3_ERR_USAGE, "report runs as one process, started without mpirun; got %d ranks", comm->world);
  for (int i = 0; i < options.files; i++) K3_TRY(check_file(argv[optind + i]));
  const char *words[MAX_FILES + 8];
  int count = 0;
  words[count++] = "--output";
  words[count++] = options.output;
  words[count++] = "--bandwidth";
  words[count++] = options.bandwidth;
  if (options.overwrite) words[count++] = "--overwrite";
  words[count++] = "--";
  for (int i = 0; i < options.files; i++) words[count++] = argv[optind + i];
  words[count] = NULL;
  return k3_helper_run("report.py", words, NULL, NULL);
}
