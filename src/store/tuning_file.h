/* The tuning file: what `k3decode tune` measured, and what it holds for. Layer: store.
 *
 * One small self-describing HDF5 file (root attribute format = "k3decode-tuning"), written in one go (hdf5_image.h): the
 * members of K3AttentionTuning as root attributes, those of K3AttentionTrial as columns /trials/NAME [trials]. */
#ifndef K3_STORE_TUNING_FILE_H
#define K3_STORE_TUNING_FILE_H

#include "plan/attention_tuning.h"

#define K3_TUNING_FORMAT "k3decode-tuning"

enum { K3_TUNING_FORMAT_VERSION = 1 };

typedef struct {
  char version[32], command[1024], start_time[32], model[512];
  char versions[512];    /* of the libraries */
  char device_line[512]; /* the device in words */
  uint64_t model_digest;
  K3AttentionTuning tuning;
} K3TuningFile;

/* Errors: K3_ERR_INPUT, those of k3_partial_check and k3_hdf5_write_image. */
K3Status k3_tuning_file_check(const char *path, int overwrite);
K3Status k3_tuning_file_write(const char *path, int overwrite, const K3TuningFile *content);

/* *content is released by k3_tuning_file_close (safe on NULL). Values that no tuning can have are refused.
 * Errors: K3_ERR_INPUT. */
K3Status k3_tuning_file_read(const char *path, K3TuningFile **content);
void k3_tuning_file_close(K3TuningFile *content);

#endif
