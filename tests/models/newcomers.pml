/* A model of newcomers as they are built (docs/design/membership.md, "Built"): all places contribute to each shard,
 * memory devices stand in for lost workers and for newcomers that are no members yet, and the boundary is a byte of its
 * own, which workers push when they begin a step and pull when they begin the next one.
 *
 * Processes, steps and errors as in membership.pml. There is one shard of data. With LAZY a worker pulls it only before
 * it pushes it again, so that it is under way when workers go over a boundary.
 */

#ifndef STEPS
#define STEPS 3
#endif
#ifndef FOUNDERS
#define FOUNDERS 7
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef JOINS
#define JOINS 1
#endif
#ifndef DEVICE_DEATHS
#define DEVICE_DEATHS 0
#endif
#ifndef MIN_WORKERS
#define MIN_WORKERS 1
#endif

#define WORKERS 3
#define DEVICES 2
#define DATA 0
#define BOUNDARY 1
#define SHARDS 2
#define MOST_EPOCHS (JOINS + 2)
#define NEVER 9

#define bit(rank) (1 << (rank))
#define has(mask, rank) (((mask) >> (rank)) & 1)
#define of(rank, shard) ((rank) * SHARDS + (shard))
#define at(step, shard) ((step) * SHARDS + (shard))
#define route(rank, shard) (((rank) / 2 + (shard)) % DEVICES) /* two workers push a shard to the same device */
#define queue(rank, device) queues[(rank) * DEVICES + (device)]

/* ---- shared memory ---- */

chan queues[WORKERS * DEVICES] = [2] of { byte, byte, byte }; /* descriptors: shard, step, epoch */
byte arrivals[SHARDS];
byte claimed[WORKERS * SHARDS];
byte contribution[WORKERS * SHARDS];
byte epochOf[WORKERS * SHARDS];
bool isPresent[WORKERS * SHARDS];
byte done[WORKERS * SHARDS];
byte newest;                 /* epoch */
byte memberSince[WORKERS];   /* epoch; NEVER before a newcomer is a member */
byte firstStep[MOST_EPOCHS]; /* the step that members begin when they enter an epoch; 0 before */
bool isAborted;

#define HALF 100
#define WHOLE(step) (100 + (step))
byte slot[WORKERS];

/* ---- processes ---- */

byte isAlive = FOUNDERS;
byte isJoining; /* workers in the places of others that have not taken part yet */
bool isDeviceAlive[DEVICES] = true;
byte drained[DEVICES];
byte lost[DEVICES];
byte mapped[DEVICES];
byte ready[DEVICES]; /* newcomers that have told this device that they wait */
byte numDeaths, numJoins, numDeviceDeaths;
byte finished;

#define isBroken (isAborted || !isDeviceAlive[0] || !isDeviceAlive[1])
#define areOthersDone(rank) ((isAlive & ~isJoining & ~finished & ~bit(rank)) == 0)
#define isFree(rank) (!has(isAlive, rank) && has(lost[0], rank) && has(lost[1], rank))
#define lives(rank) (memberSince[rank] != NEVER && !has(lost[0], rank))

/* ---- what only assertions read ---- */

byte pushed[(STEPS + 1) * SHARDS];
byte mean[(STEPS + 1) * SHARDS];
byte world[STEPS + 2];

/* ---- a worker ---- */

#ifdef MISTAKE_NO_LABEL /* it does not tell devices for which epoch it pushes */
#define label 0
#else
#define label epoch
#endif

#define reset() atomic { epoch = 0; step = 1; isNew = true }

proctype Worker(byte rank) {
  byte step = 1, epoch;
  bool isNew = true; /* it has pushed nothing */

start:
  {
    if
    :: !has(isJoining, rank)
    :: atomic { has(isJoining, rank) && has(mapped[0], rank) && has(mapped[1], rank) -> ready[0] = ready[0] | bit(rank) }
      ready[1] = ready[1] | bit(rank);
      if
      :: atomic { memberSince[rank] != NEVER && firstStep[memberSince[rank]] != 0 ->
          epoch = memberSince[rank];
          step = firstStep[epoch] }
      :: isBroken || areOthersDone(rank) -> goto end
      fi;
      if
#ifdef MISTAKE_NO_FLAGS /* it does not wait until the steps before are complete */
      :: atomic { true ->
#else
      :: atomic { done[of(rank, DATA)] == step - 1 && done[of(rank, BOUNDARY)] == step - 1 ->
#endif
          slot[rank] = HALF;
          isJoining = isJoining & ~bit(rank) }
      :: isBroken -> goto end
      fi
    :: has(isJoining, rank) && (isBroken || areOthersDone(rank)) -> goto end
    fi;

    do
    :: step > STEPS -> break
    :: else ->
      /* Goes over the boundary. */
      if
      :: isNew
      :: !isNew && done[of(rank, BOUNDARY)] == step - 1
      :: !isNew && isBroken -> goto end
      fi;
      atomic {
        if
        :: newest != epoch ->
          epoch = newest;
          assert(firstStep[epoch] == 0 || firstStep[epoch] == step);
          firstStep[epoch] = step
        :: else
        fi;
        assert(memberSince[rank] <= epoch);
        assert(world[step] == 0 || world[step] == epoch + 1); /* all enter an epoch with the same step */
        world[step] = epoch + 1;
        queue(rank, route(rank, BOUNDARY)) ! BOUNDARY, step, label;
        pushed[at(step, BOUNDARY)] = pushed[at(step, BOUNDARY)] | bit(rank) };
#ifdef LAZY
      if
      :: isNew
      :: atomic { !isNew && done[of(rank, DATA)] == step - 1 ->
          assert(slot[rank] == mean[at(step - 1, DATA)]);
          slot[rank] = HALF }
      :: !isNew && isBroken -> goto end
      fi;
#endif
      atomic {
        isNew = false;
        slot[rank] = WHOLE(step);
        queue(rank, route(rank, DATA)) ! DATA, step, label;
        pushed[at(step, DATA)] = pushed[at(step, DATA)] | bit(rank) };
#ifndef LAZY
      if
      :: atomic { done[of(rank, DATA)] == step ->
          assert(slot[rank] == mean[at(step, DATA)]); /* equal on all */
          slot[rank] = HALF }
      :: isBroken -> goto end
      fi;
#endif
#ifdef WITNESS_NEWCOMER
      assert(memberSince[rank] == 0 || mean[at(step, DATA)] == 0);
#endif
      step++
    od;
    if
    :: atomic { done[of(rank, DATA)] == STEPS -> finished = finished | bit(rank); reset(); goto end }
    :: isBroken -> goto end
    fi
  } unless { !has(isAlive, rank) };
  reset();

end: /* the launcher starts a newcomer */
  do
  :: atomic { numJoins < JOINS && !isBroken && !finished && isFree(rank) ->
      numJoins++;
      isAlive = isAlive | bit(rank);
      isJoining = isJoining | bit(rank);
      goto start }
  od
}

/* ---- a memory device ---- */

/* Whether a place lacks a contribution for which this device stands in. */
#define lacks(me, each, worker, other) \
  (other != worker && contribution[of(other, each)] > done[of(other, each)] && \
   claimed[of(worker, each)] < contribution[of(other, each)] && \
   (has(lost[me], worker) || (has(mapped[me], worker) && lacksEpoch(each, worker, other))))
#ifdef MISTAKE_STAND_IN_BY_STATE /* for a newcomer until it is a member, whatever the epoch of the step */
#define lacksEpoch(each, worker, other) (memberSince[worker] == NEVER)
#else
#define lacksEpoch(each, worker, other) (memberSince[worker] > epochOf[of(other, each)])
#endif

#define turn() shard = 0; step = 0; epoch = 0; client = 0; mask = 0; isStandIn = false; goto end

proctype Device(byte me) {
  byte shard, step, epoch, client, mask;
  bool isStandIn;

  {
end:
    do
#define take(rank) \
    :: atomic { queue(rank, me) ? shard, step, epoch -> \
        client = rank; \
        assert(claimed[of(rank, shard)] == step - 1); /* no device has stood in for what a worker contributes */ \
        claimed[of(rank, shard)] = step; \
        goto record }
    take(0) take(1) take(2)

#define drain(rank) \
    :: atomic { !has(isAlive, rank) && !has(drained[me], rank) && empty(queue(rank, me)) -> \
        ready[me] = ready[me] & ~bit(rank); \
        drained[me] = drained[me] | bit(rank) }
    drain(0) drain(1) drain(2)

#define learn(rank) \
    :: atomic { has(drained[0], rank) && has(drained[1], rank) && !has(lost[me], rank) && !has(isAlive, rank) -> \
        lost[me] = lost[me] | bit(rank); \
        if \
        :: me == 0 && lives(0) + lives(1) + lives(2) < MIN_WORKERS -> isAborted = true \
        :: else \
        fi }
    learn(0) learn(1) learn(2)

#define map(rank) \
    :: atomic { has(isJoining, rank) && has(isAlive, rank) && !has(mapped[me], rank) && has(lost[me], rank) -> \
        memberSince[rank] = NEVER; \
        mapped[me] = mapped[me] | bit(rank); \
        drained[me] = drained[me] & ~bit(rank); \
        lost[me] = lost[me] & ~bit(rank) }
    map(0) map(1) map(2)

#define standIn(each, worker, other) \
    :: atomic { lacks(me, each, worker, other) -> \
        shard = each; \
        client = worker; \
        step = contribution[of(other, each)]; \
        epoch = epochOf[of(other, each)]; \
        isStandIn = true; \
        claimed[of(worker, each)] = step; \
        goto record }
#define standIns(each) \
    standIn(each, 0, 1) standIn(each, 0, 2) standIn(each, 1, 0) \
    standIn(each, 1, 2) standIn(each, 2, 0) standIn(each, 2, 1)
    standIns(DATA)
    standIns(BOUNDARY)
    od;

record:
    atomic {
      contribution[of(client, shard)] = step;
      epochOf[of(client, shard)] = epoch;
      isPresent[of(client, shard)] = !isStandIn;
      arrivals[shard]++;
      if
      :: arrivals[shard] != WORKERS -> turn()
      :: else -> arrivals[shard] = 0
      fi;

      /* Complete. */
      client = 0;
      do
      :: client < WORKERS ->
        assert(contribution[of(client, shard)] == step && epochOf[of(client, shard)] == epoch);
        if
        :: isPresent[of(client, shard)] ->
          assert(shard == BOUNDARY || slot[client] == WHOLE(step)); /* nothing half written */
          mask = mask | bit(client)
        :: else
        fi;
        client++
      :: else -> break
      od;
      assert(mask == pushed[at(step, shard)]);
      assert(mean[at(step, shard)] == 0);
      mean[at(step, shard)] = mask;
      client = 0;
      if
      :: shard == BOUNDARY ->
        mask = 0;
        do
        :: client < WORKERS ->
          if
          :: has(ready[me], client) && memberSince[client] == NEVER -> memberSince[client] = newest + 1; mask = 1
          :: else
          fi;
          client++
        :: else -> break
        od;
        newest = newest + mask;
        mask = 0
      :: else
      fi;
      client = 0
    }
    /* Results of those that have contributed, then all flags. */
    do
    :: atomic { client < WORKERS ->
        if
        :: shard == DATA && has(mask, client) -> slot[client] = mean[at(step, shard)]
        :: else
        fi;
        client++ }
    :: atomic { client == WORKERS -> client = 0; break }
    od;
    do
    :: atomic { client < WORKERS ->
#ifdef MISTAKE_FLAGS_GO_BACK
        done[of(client, shard)] = step;
#else
        done[of(client, shard)] = (done[of(client, shard)] > step -> done[of(client, shard)] : step);
#endif
        client++;
        if
        :: client == WORKERS -> turn()
        :: else
        fi }
    od
  } unless { !isDeviceAlive[me] }
}

init {
  atomic {
    slot[0] = HALF; slot[1] = HALF; slot[2] = HALF;
    if
    :: !has(FOUNDERS, 2) -> memberSince[2] = NEVER
    :: else
    fi;
    run Worker(0); run Worker(1); run Worker(2);
    run Device(0); run Device(1)
  }
end:
  do
#define kill(rank) \
  :: atomic { numDeaths < DEATHS && has(isAlive, rank) && !has(finished, rank) -> \
      numDeaths++; \
      isAlive = isAlive & ~bit(rank); \
      isJoining = isJoining & ~bit(rank); \
      mapped[0] = mapped[0] & ~bit(rank); \
      mapped[1] = mapped[1] & ~bit(rank) }
  kill(0) kill(1) kill(2)
#define killDevice(device) \
  :: atomic { numDeviceDeaths < DEVICE_DEATHS && isDeviceAlive[device] -> \
      numDeviceDeaths++; \
      isDeviceAlive[device] = false }
  killDevice(0) killDevice(1)
  od
}
