/* The one error message of a rank. See status.h. Layer: base. */
#include "base/status.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t message_lock = PTHREAD_MUTEX_INITIALIZER;
static char message[4096];
static char origin[320];

K3Status k3_status_fail(K3Status status, const char *file, int line, const char *format, ...)
{
  pthread_mutex_lock(&message_lock);
  if (message[0] == '\0') {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    const char *debug = getenv("K3_DEBUG_ERRORS");
    if (debug && debug[0] == '1' && length >= 0 && (size_t)length < sizeof message)
      snprintf(message + length, sizeof message - (size_t)length, " [%s:%d]", file, line);
  }
  pthread_mutex_unlock(&message_lock);
  return status;
}

const char *k3_status_message(void) { return message; }

void k3_status_clear(void)
{
  pthread_mutex_lock(&message_lock);
  message[0] = '\0';
  pthread_mutex_unlock(&message_lock);
}

void k3_status_set_origin(int rank, int world, const char *host)
{
  if (world > 1)
    snprintf(origin, sizeof origin, "rank %d of %d on %s: ", rank, world, host);
  else
    origin[0] = '\0';
}

const char *k3_status_origin(void) { return origin; }
