// What ranks must have in common to understand each other.
#pragma once

#include <cstdint>
#include <string>

namespace kolovod {

// Of the bytes that ranks exchange and of the memory that they share (docs/wire.md), Python's part included.
// To be raised with every change of them, since ranks of different releases can meet in one job.
inline constexpr uint32_t kProtocolVersion = 12;

// "0.1.0".
const char* ReleaseVersion();

// "Kolovod 0.1.0 (protocol 2)", for messages.
inline std::string DescribeVersion(uint32_t protocol, const std::string& release) {
  return "Kolovod " + release + " (protocol " + std::to_string(protocol) + ")";
}

}  // namespace kolovod
