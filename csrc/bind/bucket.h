// A bucket for an engine of somebody else, as the dict that _native.pyi describes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "collectives/external.h"

namespace kolovod {

inline nanobind::dict ToBucket(const ExternalJob& job) {
  nanobind::list tensors;
  for (const Piece& piece : job.pieces) {
    tensors.append(nanobind::make_tuple(reinterpret_cast<uintptr_t>(piece.in),
                                        reinterpret_cast<uintptr_t>(piece.out), piece.count));
  }
  nanobind::dict bucket;
  bucket["token"] = job.token;
  bucket["verb"] = static_cast<int>(job.verb);
  bucket["dtype"] = static_cast<int>(job.dtype);
  bucket["op"] = static_cast<int>(job.op);
  bucket["prescale"] = job.prescale;
  bucket["postscale"] = job.postscale;
  bucket["root"] = job.root;
  bucket["name"] = job.name;
  bucket["device"] = job.device;
  bucket["tensors"] = tensors;
  bucket["sizes"] = job.sizes;
  bucket["received"] = job.received;
  bucket["total"] = job.total;
  return bucket;
}

}  // namespace kolovod
