// For the thread sanitizer only. It notes the reads of a sendmsg() once the call has returned; by then the
// answer of another node, which goes into the memory that was sent, may be under way, and it would call that
// a race. The kernel had copied what was sent before anyone could answer it.
extern "C" const char* __tsan_default_options();
extern "C" const char* __tsan_default_options() { return "intercept_send=0"; }
