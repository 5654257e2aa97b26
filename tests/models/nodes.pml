/* A model of losses in a job of several nodes (docs/design/membership.md, "Several nodes"): two nodes of two workers, with
 * a memory device each. Workers 0 and 1 are on node 0, and node s owns shard s.
 *
 * Processes, steps and errors as in membership.pml. What the devices of one node do among each other is the business of that
 * model; here a device takes a contribution, a frame or a stand-in at a time. Each step exchanges both shards. With LOCAL it
 * ends with a step of shard 0 that nodes do not exchange, as an update by a mean. With LEAVES workers leave between two
 * steps, and write to their slots afterwards.
 */

#ifndef STEPS
#define STEPS 2
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef LEAVES
#define LEAVES 0
#endif

#define WORKERS 4
#define SHARDS 2

#define bit(rank) (1 << (rank))
#define has(mask, rank) (((mask) >> (rank)) & 1)
#define nodeOf(rank) ((rank) / 2)
#define partner(rank) ((rank) ^ 1)
#define of(rank, shard) ((rank) * SHARDS + (shard))
#define in(node, shard) ((node) * SHARDS + (shard))
#define seenAt(node, rank) absentSince[(node) * WORKERS + (rank)]

#ifdef LOCAL
#define exchanged(step, shard) ((shard) == 0 -> 2 * (step) - 1 : (step))
#define isLocal(step, shard) ((shard) == 0 && (step) % 2 == 0)
#define MOST_STEPS (2 * STEPS + 1)
#else
#define exchanged(step, shard) (step)
#define isLocal(step, shard) false
#define MOST_STEPS (STEPS + 1)
#endif
#define at(step, shard) ((step) * SHARDS + (shard))

/* ---- memory of the nodes, and connections between them ---- */

chan queues[WORKERS] = [3] of { byte, byte }; /* descriptors: shard, step */
mtype = { PARTIAL, RESULT, ABSENT };
chan links[2] = [8] of { mtype, byte, byte, byte }; /* to each node: kind, shard, step, contributors or rank */
byte contribution[WORKERS * SHARDS];
bool isPresent[WORKERS * SHARDS];
byte done[2 * SHARDS];
byte arrivals[SHARDS], gathered[SHARDS]; /* at the owner */
byte absentSince[2 * WORKERS];           /* by node and rank: step of shard 0 */

#define HALF 100
#define SCRIBBLE 120
#define WHOLE(step) (100 + (step))
byte slot[WORKERS * SHARDS];

byte isAlive = 15, finished, hasLeft, lost;
byte numDeaths, numLeaves;

/* ---- what only assertions read ---- */

byte pushed[MOST_STEPS * SHARDS];
byte mean[MOST_STEPS * SHARDS];
byte members[MOST_STEPS]; /* that workers see after a step of shard 0; 0 before any has seen it */

/* ---- a worker ---- */

#define push(shard, step) \
  atomic { \
    slot[of(rank, shard)] = WHOLE(step); \
    queues[rank] ! shard, step; \
    pushed[at(step, shard)] = pushed[at(step, shard)] | bit(rank) }

#ifdef MISTAKE_OWN_STAND_INS /* a worker looks whether a device stands in, where it can see that */
#define isAbsent(node, other, step) \
  (nodeOf(other) == node -> !isPresent[of(other, 0)] && contribution[of(other, 0)] >= step \
                          : seenAt(node, other) != 0 && seenAt(node, other) <= step)
#else
#define isAbsent(node, other, step) (seenAt(node, other) != 0 && seenAt(node, other) <= step)
#endif

#define look(step) \
  atomic { \
    seen = 16 | (isAbsent(nodeOf(rank), 0, step) -> 1 : 0) | (isAbsent(nodeOf(rank), 1, step) -> 2 : 0) | \
           (isAbsent(nodeOf(rank), 2, step) -> 4 : 0) | (isAbsent(nodeOf(rank), 3, step) -> 8 : 0); \
    assert(members[step] == 0 || members[step] == seen); /* all learn of it after the same step */ \
    members[step] = seen; \
    seen = 0 }

#define mayGo(rank) (has(isAlive & ~finished, partner(rank)) && !has(lost, partner(rank)))

proctype Worker(byte rank) {
  byte step = 1, seen;

  {
    do
    :: step > STEPS -> break
    :: step <= STEPS ->
      push(0, exchanged(step, 0));
      push(1, step);
      atomic { done[in(nodeOf(rank), 0)] == exchanged(step, 0) ->
        assert(slot[of(rank, 0)] == mean[at(exchanged(step, 0), 0)]) };
      atomic { done[in(nodeOf(rank), 1)] == step ->
        assert(slot[of(rank, 1)] == mean[at(step, 1)]);
        slot[of(rank, 1)] = HALF };
      look(exchanged(step, 0));
#ifdef WITNESS_UNLIKE_SHARDS_OVER_NODES
      assert(mean[at(exchanged(step, 0), 0)] == mean[at(step, 1)]);
#endif
#ifdef LOCAL
      atomic { slot[of(rank, 0)] = HALF };
      push(0, 2 * step);
      done[in(nodeOf(rank), 0)] == 2 * step;
      look(2 * step);
#endif
      atomic { slot[of(rank, 0)] = HALF; step++ }
#if LEAVES > 0
    :: atomic { numLeaves < LEAVES && step > 1 && step <= STEPS && mayGo(rank) ->
        numLeaves++;
        hasLeft = hasLeft | bit(rank);
        isAlive = isAlive & ~bit(rank);
        step = 0;
        goto left }
#endif
    od;
    atomic { finished = finished | bit(rank); step = 0; goto end }
  } unless { !has(isAlive | hasLeft, rank) };
  atomic { step = 0; seen = 0; goto end };

left: /* its script goes on for a while */
  slot[of(rank, 0)] = SCRIBBLE;
  slot[of(rank, 1)] = SCRIBBLE;
end:
  false
}

/* ---- the memory device of a node ---- */

#define first(node) (2 * (node))
#ifdef MISTAKE_FIRST_SLOT /* results are received in the slot of the first worker, whoever has contributed */
#define receiver(node, shard) first(node)
#else
#define receiver(node, shard) (isPresent[of(first(node), shard)] -> first(node) : first(node) + 1)
#endif

/* The other contribution to a shard, if the one of `worker` is missing. */
#define lacks(shard, worker) \
  (contribution[of(partner(worker), shard)] > done[in(me, shard)] && \
   contribution[of(worker, shard)] < contribution[of(partner(worker), shard)])

#ifdef MISTAKE_NO_DRAIN_ON_NODE /* it stands in as soon as the worker has ended */
#define isGone(rank) (!has(isAlive, rank))
#else
#define isGone(rank) has(lost, rank)
#endif

/* Frames about workers of this node for which it has begun to stand in. */
#define isNewlyAbsent(rank) (!isPresent[of(rank, 0)] && seenAt(me, rank) == 0)
#define announce(rank) \
  if \
  :: shard == 0 && isNewlyAbsent(rank) -> links[1 - me] ! ABSENT, 0, step, rank \
  :: else \
  fi
/* The owner's frames about workers that are absent from this step on. */
#define pass(rank) \
  if \
  :: shard == 0 && seenAt(me, rank) == step -> links[1 - me] ! ABSENT, 0, step, rank \
  :: else \
  fi
#define note(rank) \
  if \
  :: shard == 0 && isNewlyAbsent(rank) -> seenAt(me, rank) = step \
  :: else \
  fi

#define turn() shard = 0; step = 0; value = 0; goto end

/* The result is written to the slots of workers that have contributed. */
#define write(rank) \
  if \
  :: isPresent[of(rank, shard)] -> slot[of(rank, shard)] = value \
  :: else \
  fi

proctype Device(byte me) {
  byte shard, step, value;
  byte a = first(me), b = first(me) + 1;

end:
  do
#define take(rank) \
  :: atomic { queues[rank] ? shard, step -> \
      assert(contribution[of(rank, shard)] == step - 1); /* no stand-in for what a worker contributes */ \
      contribution[of(rank, shard)] = step; \
      isPresent[of(rank, shard)] = true; \
      goto contributed }
  take(a) take(b)

#define learn(rank) \
  :: atomic { !has(isAlive, rank) && !has(lost, rank) && empty(queues[rank]) -> lost = lost | bit(rank) }
  learn(a) learn(b)

#define standIn(each, worker) \
  :: atomic { isGone(worker) && !has(lost, partner(worker)) && lacks(each, worker) -> \
      shard = each; \
      step = contribution[of(partner(worker), each)]; \
      contribution[of(worker, each)] = step; \
      isPresent[of(worker, each)] = false; \
      goto contributed }
  standIn(0, a) standIn(0, b) standIn(1, a) standIn(1, b)

  :: atomic { links[me] ? ABSENT, shard, step, value ->
      assert(seenAt(me, value) == 0);
      seenAt(me, value) = step;
      turn() }
  :: atomic { links[me] ? PARTIAL, shard, step, value ->
      assert(shard == me);
      gathered[shard] = gathered[shard] | value;
      goto arrived }
  :: atomic { links[me] ? RESULT, shard, step, value ->
      slot[of(receiver(me, shard), shard)] = value;
      goto received }
  od;

contributed:
  atomic {
    if
    :: contribution[of(a, shard)] != contribution[of(b, shard)] -> turn()
    :: else
    fi;
    value = 0;
    if
    :: isPresent[of(a, shard)] -> assert(slot[of(a, shard)] == WHOLE(step)); value = value | bit(a)
    :: else
    fi;
    if
    :: isPresent[of(b, shard)] -> assert(slot[of(b, shard)] == WHOLE(step)); value = value | bit(b)
    :: else
    fi;
    if
    :: isLocal(step, shard) -> done[in(me, shard)] = step; turn()
    :: !isLocal(step, shard) && shard != me ->
#ifdef MISTAKE_ABSENT_BEHIND_PARTIAL
      links[1 - me] ! PARTIAL, shard, step, value;
      announce(a); announce(b);
#else
      announce(a); announce(b);
      links[1 - me] ! PARTIAL, shard, step, value;
#endif
      turn()
    :: else
    fi;
    note(a); note(b);
    gathered[shard] = gathered[shard] | value
  };

arrived:
  atomic {
    arrivals[shard]++;
    if
    :: arrivals[shard] != 2 -> turn()
    :: else
    fi;
    arrivals[shard] = 0;
    value = gathered[shard];
    gathered[shard] = 0;
    assert(value == pushed[at(step, shard)]); /* over exactly those that have committed a descriptor */
    assert(mean[at(step, shard)] == 0);
    mean[at(step, shard)] = value;
    write(a); write(b);
#ifdef MISTAKE_ABSENT_BEHIND_RESULT
    links[1 - me] ! RESULT, shard, step, value;
    pass(0); pass(1); pass(2); pass(3);
#else
    pass(0); pass(1); pass(2); pass(3);
    links[1 - me] ! RESULT, shard, step, value;
#endif
    done[in(me, shard)] = step;
    turn()
  };

received: /* copies it from where it was received */
  atomic {
    value = slot[of(receiver(me, shard), shard)];
    write(a); write(b);
    done[in(me, shard)] = step;
    turn()
  }
}

init {
  atomic {
    byte each;
    for (each : 0 .. WORKERS * SHARDS - 1) { slot[each] = HALF; isPresent[each] = true }
    each = 0;
    run Worker(0); run Worker(1); run Worker(2); run Worker(3);
    run Device(0); run Device(1)
  }
end:
  do
#define kill(rank) \
  :: atomic { numDeaths < DEATHS && has(isAlive, rank) && !has(finished, rank) && mayGo(rank) -> \
      numDeaths++; \
      isAlive = isAlive & ~bit(rank) }
  kill(0) kill(1) kill(2) kill(3)
  od
}
