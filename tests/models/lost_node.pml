/* A model of a lost node (docs/design/membership.md, "A lost node"): three nodes, each with one worker and one memory
 * device. Node s owns shard s, of two shards. A node dies at any time, with what its connections still hold. With
 * DEATHS 2 another one dies later, when the survivors have gone on.
 *
 * What the devices of one node do among each other, and worker losses, are the business of membership.pml and nodes.pml.
 * A frame is taken at once, except a result: the node may die while a part of it has come.
 *
 * Checked: survivors get the same mean of each shard and step, over exactly nodes that have pushed it whole, all
 * survivors among them; all learn of a loss after the same step; no end but that of all survivors' steps.
 */

#ifndef STEPS
#define STEPS 2
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef VICTIMS
#define VICTIMS 7 /* bit mask of nodes that may die first */
#endif

#define NODES 3
#define SHARDS 2
#define NOBODY 9

#define bit(node) (1 << (node))
#define has(mask, node) (((mask) >> (node)) & 1)
#define at(node, shard) ((node) * SHARDS + (shard))
#define from(node, shard, other) (((node) * SHARDS + (shard)) * NODES + (other))
#define way(sender, receiver) links[(sender) * NODES + (receiver)]

mtype = { PARTIAL, RESULT, ABSENT, REPORT, REPORTED, FETCH, HANDED, SETTLED };
chan links[NODES * NODES] = [10] of { mtype, byte, byte, byte }; /* kind, shard, step, contributors or other number */

byte isAlive = 7, finished;
byte numDeaths;

/* ---- memory of the nodes ---- */

byte owner[NODES * SHARDS];            /* as each node sees it */
byte round[NODES * SHARDS], result[NODES * SHARDS];
byte contributed[NODES * SHARDS * NODES], part[NODES * SHARDS * NODES]; /* at the owner */
byte begun[NODES * SHARDS];
byte landing[NODES * SHARDS];          /* the last result, contributors; HALF while one comes */
byte slot[NODES * SHARDS];             /* what the node has contributed; HALF if a part of it is overwritten */
byte landed[NODES * SHARDS];           /* the step of that result */
byte absentSince[NODES * NODES];       /* by node and lost node: step of shard 0 */
#define HALF 100

byte lost[NODES];    /* nodes whose frames it takes no more */
byte gone[NODES];    /* nodes without which it goes on */
byte leaving[NODES]; /* the node on whose loss all agree; NOBODY for none */
byte moved[NODES];   /* shards that it owned */
byte reported[NODES], settled[NODES]; /* nodes that have said so */
bool isSettling[NODES];
byte numFetches[NODES];
byte half[NODES];    /* the shard of a result that comes, plus 1 */
byte halfFrom[NODES];

/* ---- what only assertions read ---- */

byte pushed[SHARDS * (STEPS + 1)];
byte got[NODES * SHARDS];                /* contributors of the mean of the current step of a worker */
byte means[NODES * SHARDS * (STEPS + 1)]; /* by node: the mean that its worker has used */
byte members[NODES * (STEPS + 1)];

#define mean(node, shard, step) means[((node) * SHARDS + (shard)) * (STEPS + 1) + (step)]

#define send(to, kind, a, b, c) \
  if \
  :: has(isAlive, to) && !has(lost[me], to) -> way(me, to) ! kind, a, b, c \
  :: else \
  fi

#define clear() shard = 0; step = 0; value = 0; other = 0; each = 0

/* The contributions of nodes to the step of an owned shard that this node has contributed to. */
#define isIn(node) (contributed[from(me, shard, node)] > round[at(me, shard)])
#define mayBegin(node) (isIn(node) || has(gone[me], node))
/* A node is absent from the step on that is reduced without it. */
#define noteAbsent(node) \
  if \
  :: shard == 0 && contributed[from(me, 0, node)] != step && absentSince[me * NODES + (node)] == 0 -> \
    absentSince[me * NODES + (node)] = step \
  :: else \
  fi
#define sayAbsent(to, node) \
  if \
  :: shard == 0 && absentSince[me * NODES + (node)] == step -> send(to, ABSENT, 0, step, node) \
  :: else \
  fi

#define deliver() \
  got[at(me, shard)] = value

#ifdef MISTAKE_RESULT_IN_SLOT /* a result is received where the contribution lies */
#define overwrite() slot[at(me, shard)] = HALF
#else
#define overwrite() skip
#endif

#ifdef MISTAKE_COUNT_OLD /* what a lost node has contributed to an earlier step is taken for this one's */
#define counted(node) part[from(me, shard, node)]
#else
#define counted(node) (contributed[from(me, shard, node)] == step -> part[from(me, shard, node)] : 0)
#endif

#ifdef MISTAKE_LATE_FRAMES /* frames of the lost node are taken when this node has reported */
#define isCut(node) has(gone[me], node)
#else
#define isCut(node) has(lost[me], node)
#endif

#ifdef MISTAKE_NO_REPORTS /* the new owner takes its own position for that of all */
#define waitsFor(node) ((node) == me)
#else
#define waitsFor(node) true
#endif

byte roundOf[NODES * SHARDS * NODES], resultOf[NODES * SHARDS * NODES]; /* reports, by receiver */

/* Tells the node `to` of the result of `step`, contributors `value`. */
#define give(to) \
  sayAbsent(to, 0); sayAbsent(to, 1); sayAbsent(to, 2); \
  send(to, RESULT, shard, step, value)

#define forLiveOthers(node, action) \
  if \
  :: (node) != me && !has(lost[me], node) -> action \
  :: else \
  fi

proctype Node(byte me) {
  byte mine = 1, phase;                  /* the worker: its step, and shards that it has pushed */
  byte shard, step, value, other, each;  /* of a turn */

start:
  do
  /* ---- the worker ---- */
#define toPush ((phase + me) % 2)
  :: atomic { has(isAlive, me) && phase < 2 && mine <= STEPS && !has(moved[me], toPush) ->
      shard = toPush; step = mine;
      phase++;
      slot[at(me, shard)] = bit(me);
      pushed[shard * (STEPS + 1) + step] = pushed[shard * (STEPS + 1) + step] | bit(me);
      got[at(me, shard)] = 0;
      if
      :: owner[at(me, shard)] == me ->
        contributed[from(me, shard, me)] = step;
        part[from(me, shard, me)] = bit(me);
        goto arrived
      :: else ->
        round[at(me, shard)] = step;
        send(owner[at(me, shard)], PARTIAL, shard, step, bit(me));
        clear()
      fi }
  :: atomic { has(isAlive, me) && phase == 2 && got[at(me, 0)] != 0 && got[at(me, 1)] != 0 ->
      for (shard : 0 .. SHARDS - 1) {
        value = got[at(me, shard)];
        assert(value < HALF);                                                 /* no half-written data */
        assert((value & ~pushed[shard * (STEPS + 1) + mine]) == 0);           /* only what was pushed */
        assert((isAlive & ~value) == 0);                                      /* all survivors */
        mean(me, shard, mine) = value;
        for (other : 0 .. NODES - 1) { /* the same on all of them */
          assert(!has(isAlive, other) || mean(other, shard, mine) == 0 || mean(other, shard, mine) == value)
        }
      }
      value = 8;
      for (other : 0 .. NODES - 1) {
        if
        :: absentSince[me * NODES + other] != 0 && absentSince[me * NODES + other] <= mine -> value = value | bit(other)
        :: else
        fi
      }
      members[me * (STEPS + 1) + mine] = value;
      for (other : 0 .. NODES - 1) { /* all learn of it after the same step */
        assert(!has(isAlive, other) || members[other * (STEPS + 1) + mine] == 0 ||
               members[other * (STEPS + 1) + mine] == value)
      }
#ifdef WITNESS_UNLIKE_SHARDS_OF_LOST_NODE
      assert(got[at(me, 0)] == got[at(me, 1)]);
#endif
      mine++;
      phase = 0;
      if
      :: mine > STEPS -> finished = finished | bit(me)
      :: else
      fi;
      clear() }

  /* ---- frames of other nodes ---- */
#define hears(sender) (has(isAlive, me) && !isCut(sender) && sender != me)
#define takes(sender) \
  :: atomic { hears(sender) && way(sender, me) ? [PARTIAL, _, _, _] -> \
      way(sender, me) ? PARTIAL, shard, step, value; \
      assert(owner[at(me, shard)] == me); \
      contributed[from(me, shard, sender)] = step; \
      part[from(me, shard, sender)] = value; \
      goto arrived } \
  :: atomic { hears(sender) && half[me] == 0 && way(sender, me) ? [RESULT, _, _, _] -> \
      way(sender, me) ? <RESULT, shard, step, value>; \
      assert(owner[at(me, shard)] == sender && round[at(me, shard)] == step && result[at(me, shard)] != step); \
      half[me] = shard + 1; \
      halfFrom[me] = sender; \
      landing[at(me, shard)] = HALF; \
      overwrite(); \
      clear() } \
  :: atomic { hears(sender) && half[me] != 0 && halfFrom[me] == sender -> \
      way(sender, me) ? RESULT, shard, step, value; \
      half[me] = 0; \
      landing[at(me, shard)] = value; \
      landed[at(me, shard)] = step; \
      result[at(me, shard)] = step; \
      deliver(); \
      clear() } \
  :: atomic { hears(sender) && half[me] == 0 && way(sender, me) ? [ABSENT, _, _, _] -> \
      way(sender, me) ? ABSENT, shard, step, value; \
      assert(absentSince[me * NODES + value] == 0 || absentSince[me * NODES + value] == step); \
      absentSince[me * NODES + value] = step; \
      clear() } \
  :: atomic { hears(sender) && way(sender, me) ? [REPORT, _, _, _] -> \
      way(sender, me) ? REPORT, shard, step, value; \
      roundOf[from(me, shard, sender)] = step; \
      resultOf[from(me, shard, sender)] = value; \
      clear() } \
  :: atomic { hears(sender) && way(sender, me) ? [REPORTED, _, _, _] -> \
      way(sender, me) ? REPORTED, other, _, _; \
      reported[me] = reported[me] | bit(sender); \
      if \
      :: leaving[me] == NOBODY -> goto leaves \
      :: else -> assert(leaving[me] == other); clear() \
      fi } \
  :: atomic { hears(sender) && way(sender, me) ? [FETCH, _, _, _] -> \
      way(sender, me) ? FETCH, shard, step, _; \
      assert(landed[at(me, shard)] == step && result[at(me, shard)] == step); \
      value = landing[at(me, shard)]; \
      sayAbsent(sender, 0); sayAbsent(sender, 1); sayAbsent(sender, 2); \
      send(sender, HANDED, shard, step, value); \
      clear() } \
  :: atomic { hears(sender) && way(sender, me) ? [HANDED, _, _, _] -> \
      way(sender, me) ? HANDED, shard, step, value; \
      goto handed } \
  :: atomic { hears(sender) && way(sender, me) ? [SETTLED, _, _, _] -> \
      way(sender, me) ? SETTLED, _, _, _; \
      settled[me] = settled[me] | bit(sender); \
      clear() }
  takes(0) takes(1) takes(2)

  /* ---- a loss ---- */
#define notices(dead) \
  :: atomic { has(isAlive, me) && leaving[me] == NOBODY && !has(isAlive, dead) && !has(lost[me], dead) -> \
      other = dead; \
      goto leaves }
  notices(0) notices(1) notices(2)

  :: atomic { has(isAlive, me) && leaving[me] != NOBODY && !isSettling[me] && (reported[me] | lost[me]) == 7 ->
      isSettling[me] = true;
      goto settles }
  :: atomic { has(isAlive, me) && isSettling[me] && numFetches[me] == 0 && !has(settled[me], me) ->
      settled[me] = settled[me] | bit(me);
      forLiveOthers(0, send(0, SETTLED, 0, 0, 0));
      forLiveOthers(1, send(1, SETTLED, 0, 0, 0));
      forLiveOthers(2, send(2, SETTLED, 0, 0, 0)) }
#ifdef MISTAKE_NO_SETTLING /* a node goes on when it has settled, not when all have */
  :: atomic { has(isAlive, me) && has(settled[me], me) -> goto resumes }
#else
  :: atomic { has(isAlive, me) && isSettling[me] && (settled[me] | lost[me]) == 7 -> goto resumes }
#endif
  :: atomic { !has(isAlive, me) -> goto end }
  :: atomic { finished == isAlive && leaving[me] == NOBODY && (lost[me] | isAlive) == 7 -> goto end }
  od;

arrived: /* a contribution to an owned shard */
  atomic {
    step = contributed[from(me, shard, me)];
    if
    :: isIn(me) && mayBegin(0) && mayBegin(1) && mayBegin(2) && step > begun[at(me, shard)] -> begun[at(me, shard)] = step
    :: else -> goto next
    fi;
    value = counted(0) | counted(1) | counted(2);
    noteAbsent(0); noteAbsent(1); noteAbsent(2);
    round[at(me, shard)] = step;
    deliver();
    forLiveOthers(0, give(0));
    forLiveOthers(1, give(1));
    forLiveOthers(2, give(2));
  next:
    if
    :: each > 0 -> goto resumed /* one of all shards after a loss */
    :: else -> clear()
    fi;
    goto again
  };

leaves: /* takes no more frames of `other`, and reports */
  atomic {
    leaving[me] = other;
    lost[me] = lost[me] | bit(other);
#ifndef MISTAKE_LATE_FRAMES
    do
    :: len(way(other, me)) > 0 -> way(other, me) ? _, _, _, _
    :: else -> break
    od;
    if
    :: half[me] != 0 && halfFrom[me] == other -> half[me] = 0
    :: else
    fi;
#endif
    value = (has(lost[me], 0) -> (has(lost[me], 1) -> 2 : 1) : 0); /* the lowest that lives */
    for (shard : 0 .. SHARDS - 1) {
      if
      :: owner[at(me, shard)] == other ->
        moved[me] = moved[me] | bit(shard);
        owner[at(me, shard)] = value;
        if
        :: shard == 0 && round[at(me, 0)] != result[at(me, 0)] ->
          for (each : 0 .. NODES - 1) {
            if
            :: absentSince[me * NODES + each] == round[at(me, 0)] -> absentSince[me * NODES + each] = 0
            :: else
            fi
          }
        :: else
        fi;
        if
        :: value != me -> send(value, REPORT, shard, round[at(me, shard)], result[at(me, shard)])
        :: else
        fi
      :: else
      fi
    }
    forLiveOthers(0, send(0, REPORTED, other, 0, 0));
    forLiveOthers(1, send(1, REPORTED, other, 0, 0));
    forLiveOthers(2, send(2, REPORTED, other, 0, 0));
    reported[me] = reported[me] | bit(me);
    clear();
    goto again
  };

#define reportOf(node) \
  if \
  :: (node) != me && !has(lost[me], node) && waitsFor(node) -> \
    if \
    :: resultOf[from(me, shard, node)] > step -> step = resultOf[from(me, shard, node)] \
    :: else \
    fi \
  :: else \
  fi
#define isWaiting(node) \
  ((node) != me && !has(lost[me], node) && roundOf[from(me, shard, node)] == step && \
   resultOf[from(me, shard, node)] != step)
#define giveIfWaiting(node) \
  if \
  :: isWaiting(node) -> give(node) \
  :: else \
  fi
#define fetchFrom(node) \
  if \
  :: (node) != me && !has(lost[me], node) && resultOf[from(me, shard, node)] == step && other == NOBODY -> \
    other = node \
  :: else \
  fi

settles: /* gives results that some have to those that lack them */
  atomic {
    for (shard : 0 .. SHARDS - 1) {
      if
      :: has(moved[me], shard) && owner[at(me, shard)] == me ->
        step = result[at(me, shard)];
        reportOf(0); reportOf(1); reportOf(2);
        if
        :: step == 0 -> goto owned
        :: result[at(me, shard)] == step ->
          value = landing[at(me, shard)];
          giveIfWaiting(0); giveIfWaiting(1); giveIfWaiting(2);
          goto owned
        :: else ->
          if
          :: round[at(me, shard)] == step || isWaiting(0) || isWaiting(1) || isWaiting(2) ->
            other = NOBODY;
            fetchFrom(0); fetchFrom(1); fetchFrom(2);
            numFetches[me]++;
            send(other, FETCH, shard, step, 0);
            goto fetched
          :: else -> goto owned
          fi
        fi;
      owned:
        if
        :: round[at(me, shard)] != result[at(me, shard)] ->
          contributed[from(me, shard, me)] = round[at(me, shard)];
          part[from(me, shard, me)] = slot[at(me, shard)]
        :: else
        fi;
        round[at(me, shard)] = result[at(me, shard)];
      fetched: skip
      :: else
      fi
    }
    clear();
    goto again
  };

handed:
  atomic {
    landing[at(me, shard)] = value;
    landed[at(me, shard)] = step;
    giveIfWaiting(0); giveIfWaiting(1); giveIfWaiting(2);
    if
    :: round[at(me, shard)] == step -> result[at(me, shard)] = step; deliver()
    :: else
    fi;
    if
    :: round[at(me, shard)] != result[at(me, shard)] ->
      contributed[from(me, shard, me)] = round[at(me, shard)];
      part[from(me, shard, me)] = slot[at(me, shard)]
    :: else
    fi;
    round[at(me, shard)] = result[at(me, shard)];
    numFetches[me]--;
    clear();
    goto again
  };

resumes: /* sends again what has no result */
  atomic {
    gone[me] = gone[me] | bit(leaving[me]);
#ifndef MISTAKE_NOT_AGAIN /* what was sent to the lost node is not sent again */
    for (shard : 0 .. SHARDS - 1) {
      if
      :: has(moved[me], shard) && owner[at(me, shard)] != me && round[at(me, shard)] != result[at(me, shard)] ->
        send(owner[at(me, shard)], PARTIAL, shard, round[at(me, shard)], slot[at(me, shard)])
      :: else
      fi
    }
#endif
    leaving[me] = NOBODY;
    moved[me] = 0;
    reported[me] = 0;
    settled[me] = 0;
    isSettling[me] = false;
    for (shard : 0 .. SHARDS * NODES - 1) {
      roundOf[me * SHARDS * NODES + shard] = 0;
      resultOf[me * SHARDS * NODES + shard] = 0
    }
    each = 0
  };
resumed: /* what lacked only the lost node */
  atomic {
    each++;
    if
    :: each > SHARDS -> clear(); goto again
    :: else
    fi;
    shard = each - 1;
    if
    :: owner[at(me, shard)] == me -> goto arrived
    :: else -> goto resumed
    fi
  };
again:
  goto start;
end:
  false
}

#define isSettledWithout(node) (!has(isAlive, node) || (leaving[node] == NOBODY && (lost[node] | isAlive) == 7))

init {
  atomic {
    byte node, shard;
    for (node : 0 .. NODES - 1) {
      leaving[node] = NOBODY;
      for (shard : 0 .. SHARDS - 1) { owner[at(node, shard)] = shard }
    }
    node = 0;
    shard = 0;
    run Node(0); run Node(1); run Node(2)
  }
end:
  do
#define kill(node) \
  :: atomic { numDeaths < DEATHS && has(isAlive, node) && finished != isAlive && \
              (numDeaths == 0 -> has(VICTIMS, node) : true) && \
              isSettledWithout(0) && isSettledWithout(1) && isSettledWithout(2) && isAlive != bit(node) -> \
      numDeaths++; \
      isAlive = isAlive & ~bit(node); \
      finished = finished & ~bit(node) }
  kill(0) kill(1) kill(2)
  od
}
