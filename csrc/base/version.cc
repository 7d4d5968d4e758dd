#include "base/version.h"

namespace kolovod {

const char* ReleaseVersion() { return KOLOVOD_RELEASE; }

}  // namespace kolovod
