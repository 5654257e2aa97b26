/* A model of membership changes (docs/design/membership.md): workers die and join while memory devices average shards.
 *
 * A process of the model is a worker or sync core 0 of a memory device. A step is one access to shared memory, or
 * several between which no other process can tell a difference. Memory is sequentially consistent. A mean is the set of its
 * contributors, as a bit mask. membership_model.py runs it, with the macros below as bounds. MISTAKE_... plants an
 * error, and WITNESS_... asserts that something does not happen that does, so that a search finds it.
 *
 * Safety is assert(). Progress: no run goes on for ever (the states have no cycle), and where none can go on, every
 * process is where it may end.
 */

#ifndef STEPS
#define STEPS 2 /* training steps */
#endif
#ifndef FOUNDERS
#define FOUNDERS 7 /* the first epoch's members, as a bit mask of ranks */
#endif
#ifndef DEATHS
#define DEATHS 1 /* workers that may die, newcomers among them */
#endif
#ifndef JOINS
#define JOINS 0 /* newcomers that the launcher may start; a launcher that has died starts none */
#endif
#ifndef DEVICE_DEATHS
#define DEVICE_DEATHS 0 /* memory devices that may die */
#endif
#ifndef MIN_WORKERS
#define MIN_WORKERS 1 /* --min-workers */
#endif

#define WORKERS 3 /* ranks; a vacant one is not a member */
#define DEVICES 2
#ifndef SHARDS
#define SHARDS 2
#endif
#define MOST_EPOCHS (DEATHS + JOINS + 2)
#define BOUNDARY 0 /* the shard whose completion decides the next epoch */

#define bit(rank) (1 << (rank))
#define has(mask, rank) (((mask) >> (rank)) & 1)
#define count(mask) (((mask) & 1) + (((mask) >> 1) & 1) + (((mask) >> 2) & 1))
#define of(rank, shard) ((rank) * SHARDS + (shard))
#define at(step, shard) ((step) * SHARDS + (shard))
#define route(rank, shard) (((rank) + (shard)) % DEVICES)
#define queue(rank, device) queues[(rank) * DEVICES + (device)]

/* ---- shared memory ---- */

chan queues[WORKERS * DEVICES] = [2] of { byte, byte, byte }; /* descriptors: shard, step, epoch */
byte arrivals[SHARDS];
byte claimed[WORKERS * SHARDS];      /* the step of the contribution that a device has taken */
byte contribution[WORKERS * SHARDS]; /* its step, stored before it is counted */
byte epochOf[WORKERS * SHARDS];      /* its epoch */
bool isPresent[WORKERS * SHARDS];    /* false: a device has stood in for a lost worker */
byte done[WORKERS * SHARDS];         /* completion flags */
byte completed[SHARDS];              /* the step of the last result, written before its flags (UpdateRecord) */
byte members[MOST_EPOCHS];           /* the epochs */
byte firstStep[MOST_EPOCHS];
byte nextEpoch;                      /* written before the completion flags of the boundary */
byte settledEpoch;                   /* the epoch of the last complete boundary: earlier steps are over */
byte ready;                          /* newcomers whom all devices have mapped */
bool isAborted;                      /* fewer members live than MIN_WORKERS */

#define HALF 100 /* of a slot; else what it holds: WHOLE(step) of its worker, or a mean */
#define WHOLE(step) (100 + (step))
byte slot[WORKERS * SHARDS];

/* ---- processes ---- */

byte isAlive = FOUNDERS; /* workers' processes, as a pidfd tells */
byte isJoining;
bool isDeviceAlive[DEVICES] = true;
byte drained[DEVICES]; /* ended workers whose queues here are empty */
byte lost[DEVICES];    /* ended workers whose queues are empty at all devices, as this device knows */
byte mapped[DEVICES];  /* newcomers whose memory this device has mapped */
byte numDeaths, numJoins, numDeviceDeaths;

#define isBroken (isAborted || !isDeviceAlive[0] || !isDeviceAlive[1])

/* ---- what only assertions read ---- */

byte pushed[(STEPS + 1) * SHARDS]; /* workers that have committed a descriptor */
byte mean[(STEPS + 1) * SHARDS];
byte world[STEPS + 2];             /* members in a step, as the first worker to take it has seen them */
byte finished;

/* A free rank has no member in this epoch, nor in one that has a step in progress. */
#ifdef MISTAKE_RANK_AT_ONCE
#define isOver(rank) (!has(members[nextEpoch], rank)) /* steps of the epoch before may be in progress */
#else
#define isOver(rank) (!has(members[settledEpoch], rank) && !has(members[nextEpoch], rank))
#endif
#define isFree(rank) (!has(isAlive, rank) && isOver(rank) && has(drained[0], rank) && has(drained[1], rank))
#define isLowestFree(rank) \
  (isFree(rank) && ((rank) < 1 || !isFree(0)) && ((rank) < 2 || !isFree(1)))

/* ---- a worker ---- */

#define reset() atomic { epoch = 0; step = 1; i = 0; shard = 0; isPulling = false }

proctype Worker(byte rank) {
  byte step = 1, epoch, i, shard;
  bool isPulling;

start:
  {
    if
    :: !has(isJoining, rank)
    :: atomic { has(isJoining, rank) && has(mapped[0], rank) && has(mapped[1], rank) -> ready = ready | bit(rank) }
      if
      :: atomic { has(members[nextEpoch], rank) ->
          epoch = nextEpoch;
          step = firstStep[epoch];
          isJoining = isJoining & ~bit(rank) }
      :: isBroken || finished -> goto end
      fi;
      do
      :: atomic { i < SHARDS && completed[i] == step - 1 ->
          slot[of(rank, i)] = HALF;
          i++;
          if
          :: i == SHARDS -> i = 0; break
          :: else
          fi }
      :: isBroken -> goto end
      od
    :: has(isJoining, rank) && (isBroken || finished) -> goto end
    fi;

    do
    :: atomic { step > STEPS -> finished = finished | bit(rank); reset(); goto end }
    :: atomic { step <= STEPS && !isPulling && i < SHARDS ->
        shard = (rank == 1 -> SHARDS - 1 - i : i); /* workers' orders differ */
        assert(has(members[epoch], rank));
        assert(world[step] == 0 || world[step] == members[epoch]); /* all learn it in the same step */
        world[step] = members[epoch];
#ifdef MISTAKE_PUSH_BEFORE_DATA
        queue(rank, route(rank, shard)) ! shard, step, epoch;
        pushed[at(step, shard)] = pushed[at(step, shard)] | bit(rank) }
      atomic {
        if
        :: slot[of(rank, shard)] == HALF -> slot[of(rank, shard)] = WHOLE(step)
        :: else
        fi;
#else
        slot[of(rank, shard)] = WHOLE(step); /* until it is pushed, nobody can tell it from a half written one */
        queue(rank, route(rank, shard)) ! shard, step, epoch;
        pushed[at(step, shard)] = pushed[at(step, shard)] | bit(rank);
#endif
        i++;
        if
        :: i == SHARDS -> i = 0; isPulling = true
        :: else
        fi;
        shard = 0 }
    :: atomic { isPulling && done[of(rank, i)] == step ->
        assert(slot[of(rank, i)] == mean[at(step, i)]); /* equal on all survivors */
        slot[of(rank, i)] = HALF;                       /* from now on the worker writes there, at any time */
        if
        :: i == BOUNDARY -> epoch = nextEpoch
        :: else
        fi;
        i++;
        if
        :: i == SHARDS ->
#ifdef WITNESS_UNLIKE_SHARDS
          assert(mean[at(step, 0)] == mean[at(step, 1)]);
#endif
#ifdef WITNESS_REUSED_RANK
          assert(!(has(FOUNDERS, rank) && firstStep[1] > 1 && firstStep[epoch] > firstStep[1] && numJoins > 0));
#endif
          i = 0; isPulling = false; step++
        :: else
        fi }
    :: isPulling && isBroken -> goto end
    od
  } unless { !has(isAlive, rank) };
  reset();

end: /* the launcher starts a newcomer, who gets the lowest free rank */
  do
  :: atomic { numJoins < JOINS && !isBroken && !finished && isLowestFree(rank) ->
      numJoins++;
      isAlive = isAlive | bit(rank);
      isJoining = isJoining | bit(rank);
      ready = ready & ~bit(rank);
      goto start }
  od
}

/* ---- a memory device ---- */

/* Whether a worker is lost that must contribute to a step to which another one has. */
#define lacks(shard, worker, other) \
  (other != worker && contribution[of(other, shard)] > done[of(other, shard)] && \
   has(members[epochOf[of(other, shard)]], worker) && \
   claimed[of(worker, shard)] < contribution[of(other, shard)])

#ifdef MISTAKE_NO_DRAIN
#define isKnownLost(device, rank) (has(drained[device], rank))
#else
#define isKnownLost(device, rank) (has(drained[0], rank) && has(drained[1], rank))
#endif

#ifdef MISTAKE_NO_FENCE /* silence is taken for the end */
#define hasEnded(rank) (numDeaths == 0 || !has(isAlive, rank))
#else
#define hasEnded(rank) (!has(isAlive, rank))
#endif

#ifdef MISTAKE_NO_CLAIM
#define mayClaim(rank) true
#else
#define mayClaim(rank) (claimed[of(rank, shard)] < step)
#endif

#ifdef MISTAKE_WRITE_VACANT /* as devices do today: a late one overwrites what a newcomer has there */
#define isReceiver(rank) true
#else
#define isReceiver(rank) has(members[epoch], rank)
#endif

#define turn() shard = 0; step = 0; epoch = 0; client = 0; mask = 0; isStandIn = false; goto end

proctype Device(byte me) {
  byte shard, step, epoch, client, mask;
  bool isStandIn;

  {
end:
    do
    /* Takes a descriptor, and claims the contribution by compare-and-swap. */
#define take(rank) \
    :: atomic { queue(rank, me) ? shard, step, epoch -> \
        client = rank; \
        if \
        :: mayClaim(rank) -> claimed[of(rank, shard)] = step; goto record \
        :: else -> turn() \
        fi }
    take(0) take(1) take(2)

    /* Sees that a worker has ended and that its queue here is empty, and tells the other device. */
#define drain(rank) \
    :: atomic { hasEnded(rank) && !has(drained[me], rank) && empty(queue(rank, me)) -> \
        drained[me] = drained[me] | bit(rank) }
    drain(0) drain(1) drain(2)

    /* Learns that all devices have seen it. */
#define learn(rank) \
    :: atomic { has(drained[me], rank) && isKnownLost(me, rank) && !has(lost[me], rank) -> \
        lost[me] = lost[me] | bit(rank); \
        if \
        :: me == 0 && count(members[nextEpoch] & ~lost[0]) < MIN_WORKERS -> isAborted = true \
        :: else \
        fi }
    learn(0) learn(1) learn(2)

    /* Maps a newcomer's memory. */
#define map(rank) \
    :: atomic { has(isJoining, rank) && has(isAlive, rank) && !has(mapped[me], rank) -> \
        mapped[me] = mapped[me] | bit(rank); \
        drained[me] = drained[me] & ~bit(rank); \
        lost[me] = lost[me] & ~bit(rank) }
    map(0) map(1) map(2)

#ifdef MISTAKE_NO_BOUNDARY /* the home device changes members when it hears of them */
    :: atomic { me == 0 && (members[nextEpoch] & lost[0] || ready & ~members[nextEpoch]) ->
        members[nextEpoch + 1] = (members[nextEpoch] & ~lost[0]) | ready;
        firstStep[nextEpoch + 1] = done[of(0, BOUNDARY)] + 1;
        nextEpoch++;
        ready = 0 }
#endif

    /* Stands in for a lost worker: claims its contribution likewise. */
#ifdef MISTAKE_NO_CLAIM
#define claimFor(each, worker) assert(true) }; atomic { claimed[of(worker, each)] = step
#else
#define claimFor(each, worker) claimed[of(worker, each)] = step
#endif
#define standIn(each, worker, other) \
    :: atomic { has(lost[me], worker) && lacks(each, worker, other) -> \
        shard = each; \
        client = worker; \
        step = contribution[of(other, each)]; \
        epoch = epochOf[of(other, each)]; \
        isStandIn = true; \
        claimFor(each, worker); \
        goto record }
#define standIns(each) \
    standIn(each, 0, 1) standIn(each, 0, 2) standIn(each, 1, 0) \
    standIn(each, 1, 2) standIn(each, 2, 0) standIn(each, 2, 1)
    standIns(0)
#if SHARDS > 1
    standIns(1)
#endif
    od;

record: /* and counts the arrival */
    atomic {
      contribution[of(client, shard)] = step;
      epochOf[of(client, shard)] = epoch;
      isPresent[of(client, shard)] = !isStandIn;
      arrivals[shard]++;
      if
      :: arrivals[shard] != count(members[epoch]) -> turn()
      :: else -> arrivals[shard] = 0
      fi;

      /* Complete: reduces what is there. */
      client = 0;
      do
      :: client < WORKERS && has(members[epoch], client) ->
        assert(contribution[of(client, shard)] == step && epochOf[of(client, shard)] == epoch);
        if
        :: isPresent[of(client, shard)] ->
          assert(slot[of(client, shard)] == WHOLE(step)); /* nothing half written */
          mask = mask | bit(client)
        :: else
        fi;
        client++
      :: client < WORKERS && !has(members[epoch], client) -> client++
      :: client == WORKERS -> break
      od;
      assert(mask == pushed[at(step, shard)]); /* whose contribution had arrived, and nobody else's */
      assert(mean[at(step, shard)] == 0);      /* one mean a shard */
      mean[at(step, shard)] = mask;
      completed[shard] = step;

      /* The boundary's device decides the next epoch. */
#ifndef MISTAKE_NO_BOUNDARY
      if
      :: shard == BOUNDARY ->
        settledEpoch = epoch;
        mask = (members[epoch] & ~lost[me]) | (ready & ~members[epoch]);
        ready = ready & ~mask;
        if
        :: mask != members[epoch] && mask != 0 ->
          nextEpoch = epoch + 1;
          members[nextEpoch] = mask;
          firstStep[nextEpoch] = step + 1
        :: else
        fi
      :: else
      fi;
#endif
      client = 0; mask = 0
    }
    do
    :: atomic { client < WORKERS ->
        if
        :: isReceiver(client) ->
          slot[of(client, shard)] = mean[at(step, shard)];
          done[of(client, shard)] = step
        :: else
        fi;
        client++;
        if
        :: client == WORKERS -> turn()
        :: else
        fi }
    od
  } unless { !isDeviceAlive[me] }
}

init {
  byte i;
  atomic {
    members[0] = FOUNDERS;
    do
    :: i < WORKERS * SHARDS -> slot[i] = HALF; i++
    :: else -> i = 0; break
    od;
    firstStep[0] = 1;
    run Worker(0); run Worker(1); run Worker(2);
    run Device(0); run Device(1)
  }
end:
  do /* deaths, anywhere */
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
