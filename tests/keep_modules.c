/* In a build with --enable-sanitizers: libraries that a library closes stay mapped. Layer: tests.
 * Open MPI closes its plug-ins before the leak check, which then knows no names for what they left behind, and
 * tests/lsan.supp cannot match it. */
int dlclose(void *library);

int dlclose(void *library)
{
  (void)library;
  return 0;
}
