// Runs a fuzz target without libFuzzer: over every file of a folder, and over changed copies of them.
//
// usage: replay FOLDER [CHANGED_COPIES]
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "fuzz/fuzz.h"

namespace {

using Input = std::vector<uint8_t>;

void Run(const Input& input) {
  // A copy of exactly its size: AddressSanitizer sees a read past the end.
  const Input exact(input.begin(), input.end());
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
}

Input Changed(const std::vector<Input>& inputs, std::mt19937& random) {
  Input input = inputs[random() % inputs.size()];
  for (uint32_t changes = 1 + random() % 4; changes > 0 && !input.empty(); --changes) {
    const size_t at = random() % input.size();
    switch (random() % 4) {
      case 0:
        input[at] = static_cast<uint8_t>(random());
        break;
      case 1:
        input[at] ^= static_cast<uint8_t>(1u << random() % 8);
        break;
      case 2:
        input.resize(at);
        break;
      default: {  // the end of another one
        const Input& other = inputs[random() % inputs.size()];
        input.resize(at);
        if (!other.empty()) {
          input.insert(input.end(), other.begin() + static_cast<ptrdiff_t>(random() % other.size()),
                       other.end());
        }
      }
    }
  }
  return input;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s FOLDER [CHANGED_COPIES]\n", argv[0]);
    return 2;
  }
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<Input> inputs;
  for (const auto& path : files) {
    std::ifstream file(path, std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  if (inputs.empty()) {
    std::fprintf(stderr, "%s holds no inputs\n", argv[1]);
    return 1;
  }
  for (const Input& input : inputs) Run(input);
  Run({});
  const long copies = argc > 2 ? std::atol(argv[2]) : 0;
  std::mt19937 random(5);
  for (long i = 0; i < copies; ++i) Run(Changed(inputs, random));
  std::printf("%zu inputs, %ld changed copies\n", inputs.size(), copies);
  return 0;
}
