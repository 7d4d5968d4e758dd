// How the binding makes engines known to the C interface (include/kolovod.h).
//
// A C client's pointer must outlive any world, and graphs that hold ops must find the world of the moment. So
// handles are never freed (one small object for each engine made), and which of them is current is known to
// the binding, not to the core.
#pragma once

#include <memory>

#include "engine/engine.h"
#include "include/kolovod.h"

namespace kolovod {

// A new handle, on which the C functions work until Detach.
kolovod_engine* Attach(std::shared_ptr<Engine> engine);
// From now on calls with `handle` fail with KOLOVOD_SHUT_DOWN; those that are running finish.
void Detach(kolovod_engine* handle);
// What kolovod_current(process_set) returns from now on; may be null. Takes no lock, so that a forked child
// may call it.
void Publish(int process_set, kolovod_engine* handle);

}  // namespace kolovod
