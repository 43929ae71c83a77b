/* The HDF5 error stack as one clause of a message, with the mend where the cause is known. Layer: store. */
#ifndef K3_STORE_HDF5_ERROR_H
#define K3_STORE_HDF5_ERROR_H

typedef struct {
  char text[1024];
} K3Hdf5Reason;

/* Switches the library's own printing and its clean-up at exit off. Cheap; call it before the first HDF5 call of an
 * object. Files must be closed before the process ends. */
void k3_hdf5_silence(void);

/* What the error stack of the last failed HDF5 call says; returns reason->text. Call it before any other HDF5
 * function (each clears the stack). Known causes come with their mend. */
const char *k3_hdf5_reason(K3Hdf5Reason *reason);

/* The same in one expression: K3_FAIL(K3_ERR_INPUT, "%s: cannot read: %s", path, K3_HDF5_REASON). */
#define K3_HDF5_REASON k3_hdf5_reason(&(K3Hdf5Reason){{0}})

/* errno of the innermost system call that failed, as the error stack tells; 0 when it tells none. */
int k3_hdf5_errno(void);

/* The cause of an errno with its mend, for calls outside HDF5 too. Written to reason->text. */
const char *k3_errno_reason(int error, K3Hdf5Reason *reason);
#define K3_ERRNO_REASON(error) k3_errno_reason((error), &(K3Hdf5Reason){{0}})

#endif
