// A rank's last operations as a file: JSON, one object a line (docs/late-ranks.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "transport/operation_record.h"

namespace kolovod {

struct RecordFileHeader {
  int rank = 0;
  int size = 1;
  uint32_t epoch = 0;
  std::string who;     // "rank 1 on host a (pid 17)"
  std::string reason;  // why the world ended
  int64_t now_ns = 0;  // CLOCK_MONOTONIC and the time of day, at the same moment
  int64_t wall_ns = 0;
};

// The file's text: the header's line, then at most `limit` of the records, the newest, and every older one
// that is pending. Times are seconds since 1970. PURE.
std::string RecordFileText(const RecordFileHeader& header, const std::vector<OperationRecord>& records,
                           size_t limit);

// Makes the folder if it is not there (for its owner only), and a new file in it.
Status WriteNewFile(const std::string& path, const std::string& text);

}  // namespace kolovod
