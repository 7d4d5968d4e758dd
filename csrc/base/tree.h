// The tree that the leaders of hosts form for the control plane. PURE.
//
// Nodes are hosts, numbered from the root on, level by level, so everybody knows the whole tree from the
// number of hosts alone. Four children: up to five hosts it is a star, as short as a way can be, and 512 are
// five levels deep, while no node ever hears from, or tells, more than five others.
#pragma once

#include <vector>

namespace kolovod {

struct Tree {
  static constexpr int kArity = 4;

  Tree(int nodes, int self) : parent(self == 0 ? -1 : ParentOf(self)), self_(self) {
    for (int child = kArity * self + 1; child <= kArity * self + kArity && child < nodes; ++child) {
      children.push_back(child);
    }
    if (parent >= 0) neighbours.push_back(parent);
    neighbours.insert(neighbours.end(), children.begin(), children.end());
  }

  static int ParentOf(int node) { return (node - 1) / kArity; }

  // The neighbour by way of which `node` is reached; the node itself if that is this one.
  int Towards(int node) const {
    int step = node;
    while (node > self_) {
      step = node;
      node = ParentOf(node);
    }
    return node == self_ ? step : parent;
  }

  // How many connections lie between.
  static int Distance(int a, int b) {
    int steps = 0;
    for (; a != b; ++steps) (a > b ? a : b) = ParentOf(a > b ? a : b);
    return steps;
  }

  int parent;                   // -1: this is the root
  std::vector<int> children;    // ascending
  std::vector<int> neighbours;  // the parent, then the children

 private:
  int self_;
};

}  // namespace kolovod
