// The tree of leaders: everybody's picture of it is the same one.
#include "base/tree.h"

#include <algorithm>

#include "testing/check.h"

namespace kolovod {
namespace {

const std::vector<int> kSizes = {1, 2, 3, 4, 5, 6, 21, 22, 64, 512};

TEST_CASE("every connection has two ends") {
  for (const int n : kSizes) {
    int connections = 0;
    for (int node = 0; node < n; ++node) {
      const Tree tree(n, node);
      CHECK(tree.children.size() <= Tree::kArity);
      CHECK((tree.parent < 0) == (node == 0));
      for (const int child : tree.children) {
        CHECK(child > node);
        CHECK(child < n);
        CHECK(Tree(n, child).parent == node);
        ++connections;
      }
      CHECK(tree.neighbours.size() == tree.children.size() + (node > 0));
    }
    CHECK(connections == n - 1);
  }
}

TEST_CASE("the way leads there") {
  for (const int n : kSizes) {
    for (int from = 0; from < n; ++from) {
      for (int to = 0; to < n; to += 1 + n / 50) {
        int at = from;
        int steps = 0;
        while (at != to) {
          const Tree tree(n, at);
          const int next = tree.Towards(to);
          CHECK(std::find(tree.neighbours.begin(), tree.neighbours.end(), next) != tree.neighbours.end());
          at = next;
          CHECK(++steps <= n);
        }
        CHECK(steps == Tree::Distance(from, to));
        CHECK(steps == Tree::Distance(to, from));
        CHECK(Tree(n, from).Towards(from) == from);
      }
    }
  }
}

TEST_CASE("it is flat") {
  CHECK(Tree::Distance(4, 0) == 1);
  CHECK(Tree::Distance(511, 0) == 5);
}

}  // namespace
}  // namespace kolovod
