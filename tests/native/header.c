#include "torpor/torpor.h"

int torpor_header_is_c(void) { return TP_ABI_VERSION; }
