#include "coarse/client/async_rows.hpp"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

namespace coarse {
namespace {

void reduceThrough(void* rows, const char* key, const std::int64_t* numbers, const void* values,
                   std::uint64_t count, std::uint64_t valueBytes, const double* weights,
                   std::uint64_t numWeights, CoarseRowsDone done, void* context) {
  static_cast<AsyncRows*>(rows)->reduce(
      key, numbers, values, count, valueBytes,
      [done, context](const char* failure, const AsyncRows::Result& result) {
        done(context, failure, result.count, result.numbers, result.values, result.factors);
      },
      {weights, static_cast<std::size_t>(numWeights)});
}

const Shard& firstShardOf(const GroupPlan& plan, std::uint32_t tensor) {
  for (const Shard& shard : plan.shards) {
    if (shard.tensor == tensor) return shard;
  }
  throw std::invalid_argument("the group has no tensor " + std::to_string(tensor));
}

}  // namespace

AsyncRows::AsyncRows(Client& client, AsyncReducer& reducer)
    : client_(client), reducer_(reducer), interface_{COARSE_ASYNC_ROWS_VERSION, this, &reduceThrough} {}

void AsyncRows::add(const std::string& key, std::uint32_t group, std::uint32_t counter, std::uint32_t table,
                    int rowsFd) {
  const GroupPlan& plan = client_.plan(group);
  const Shard& counted = firstShardOf(plan, counter);
  const Shard& shard = firstShardOf(plan, table);
  if (!plan.isTable(shard)) throw std::invalid_argument("tensor " + std::to_string(table) + " is no table");
  if (counted.dtype != DType::kInt64 || counted.op != ReduceOp::kSum || counted.numElements != 1)
    throw std::invalid_argument("rows are counted by one int64, which is added up");
  Table added;
  added.counterKey = key + "/count";
  added.rowsKey = key + "/rows";
  added.group = group;
  added.tensor = table;
  const RowTable layout = plan.rowTables()[table];
  added.numBytes = layout.numRows * layout.rowBytes;
  added.rows = std::make_unique<ClientRows>(rowsFd, plan.rowsBytes(), layout, shard.dtype);
  const std::lock_guard lock(mutex_);
  if (tables_.count(key) != 0)
    throw std::invalid_argument("there is a table of the name " + key + " already");
  reducer_.add(added.counterKey, group, counter, sizeof(std::int64_t));
  reducer_.add(added.rowsKey, group, table, added.numBytes);
  tables_.emplace(key, std::move(added));
}

bool AsyncRows::remove(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto found = tables_.find(key);
  if (found == tables_.end()) return true;
  const Table& table = found->second;
  if (table.isUnderWay || !reducer_.remove(table.counterKey) || !reducer_.remove(table.rowsKey)) return false;
  tables_.erase(found);
  return true;
}

void AsyncRows::reduce(std::string_view key, const std::int64_t* numbers, const void* values,
                       std::uint64_t count, std::size_t valueBytes, Done done, Weights weights) {
  Table* const table = find(key);
  if (table == nullptr) return done(("no table was registered as " + std::string(key)).c_str(), {});
  if (const std::size_t expected = count * table->rows->rowBytes(); expected != valueBytes) {
    const std::string lengths = std::to_string(expected) + " bytes, not " + std::to_string(valueBytes);
    return done((std::to_string(count) + " rows of " + std::string(key) + " have " + lengths).c_str(), {});
  }
  Request request{numbers, values, count, std::move(done), weights};
  {
    const std::lock_guard lock(mutex_);
    if (table->isUnderWay) {
      table->waiting.push_back(std::move(request));
      return;
    }
    table->isUnderWay = true;
  }
  table->request = std::move(request);
  begin(*table);
}

AsyncRows::Table* AsyncRows::find(std::string_view key) {
  const std::lock_guard lock(mutex_);
  const auto found = tables_.find(std::string(key));
  return found == tables_.end() ? nullptr : &found->second;
}

/// @pre this call has marked the table as in progress.
void AsyncRows::begin(Table& table) {
  const Request& request = table.request;
  try {
    table.numRows =
        static_cast<std::int64_t>(table.rows->give(request.numbers, request.values, request.count));
  } catch (const std::exception& error) {
    return finish(table, (table.rowsKey + ": " + error.what()).c_str());
  }
  reducer_.reduce(
      table.counterKey, &table.numRows, &table.numRows, sizeof table.numRows,
      [this, &table](const char* failure) { failure == nullptr ? push(table) : finish(table, failure); });
}

void AsyncRows::push(Table& table) {
  try {
    table.rows->expect(static_cast<std::uint64_t>(table.numRows));
  } catch (const std::exception& error) {
    return finish(table, (table.rowsKey + ": " + error.what()).c_str());
  }
  reducer_.reduce(table.rowsKey, nullptr, nullptr, table.numBytes,
                  [this, &table](const char* failure) { finish(table, failure); });
}

/// The factor of each row, so that the others have the weight of lost workers; empty if nobody
/// is lost.
std::vector<double> AsyncRows::factorsOf(const Table& table, const Result& rows) const {
  const Weights& weights = table.request.weights;
  if (weights.count == 0) return {};
  const std::vector<double> ofShards = client_.compensations(table.group, table.tensor, weights);
  if (std::all_of(ofShards.begin(), ofShards.end(), [](double factor) { return factor == 1; })) return {};
  const GroupPlan& plan = client_.plan(table.group);
  std::vector<double> factors;
  auto factor = ofShards.begin();
  std::uint64_t endOfShard = 0;
  for (const Shard& shard : plan.shards) {
    if (shard.tensor != table.tensor) continue;
    endOfShard += shard.numElements / plan.rowElements[table.tensor];
    while (factors.size() < rows.count && rows.numbers[factors.size()] < endOfShard)
      factors.push_back(*factor);
    ++factor;
  }
  return factors;
}

void AsyncRows::finish(Table& table, const char* failure) {
  const Done done = std::move(table.request.done);
  Result result;
  std::vector<double> factors;
  if (failure == nullptr) {
    const RowList rows = table.rows->result();
    result = {table.rows->resultCount(), rows.numbers, rows.values};
    factors = factorsOf(table, result);
    if (!factors.empty()) result.factors = factors.data();
  }
  done(failure, result);
  {
    const std::lock_guard lock(mutex_);
    table.isUnderWay = !table.waiting.empty();
    if (!table.isUnderWay) return;
    table.request = std::move(table.waiting.front());
    table.waiting.pop_front();
  }
  begin(table);
}

}  // namespace coarse
