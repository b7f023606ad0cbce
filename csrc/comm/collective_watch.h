#pragma once

#include <string>
#include <utility>
#include <vector>

namespace bagua {

// Operator and group's name of a call of torch's process groups; the name is empty where the
// operator's arguments cannot be seen, as of all_to_all_single.
using CollectiveCall = std::pair<std::string, std::string>;

// Notes, from now on, what the calling thread asks of torch's process groups, by whatever function:
// collectives, those of objects and functional ones, messages between two ranks. All arrive at the
// dispatcher as operators of c10d. Barriers, which carry no data, are left out, and what uses a
// backend without a process group, as communicators of this library do. A second call begins anew.
void watch_collectives();

// Ends it. Returns the first calls, at most 16; none where nothing was watched.
std::vector<CollectiveCall> watched_collectives();

}  // namespace bagua
