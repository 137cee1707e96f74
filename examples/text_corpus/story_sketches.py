"""Short texts for `stories.py` besides the stories: animals, weather, places, school, letters, how-to, memories."""

from typing import Any

# A slot that a text did not set is filled from here, once per text. `[creature.2]` is the field after two semicolons.
LEXICON: dict[str, tuple[str, ...]] = {
    # one; many; what it has; where it lives; what it eats; where it sleeps; what it does; a young one; a fact
    "creature": (
        "fox; foxes; a red coat and a bushy tail; in woods and fields; mice, berries and eggs; in a den under the "
        "ground; hunts at night; cub; can hear a mouse under the snow",
        "hedgehog; hedgehogs; a thousand spines on its back; in gardens and hedges; beetles, worms and slugs; under a "
        "heap of leaves; rolls up when it is afraid; hoglet; sleeps through the whole winter",
        "squirrel; squirrels; a long tail and sharp claws; in the trees of parks and forests; nuts and seeds; in a "
        "round nest of twigs; jumps from branch to branch; kitten; forgets half of the nuts that it hides",
        "owl; owls; big round eyes; in old barns and hollow trees; mice and small birds; in a dark corner under the "
        "roof; flies without a sound; owlet; can turn its head almost all the way round",
        "badger; badgers; a white face with two black stripes; in quiet woods; worms, roots and fruit; deep under the "
        "ground; comes out when it is dark; cub; keeps its home very clean",
        "otter; otters; thick brown fur and a strong tail; beside clean rivers; fish and frogs; in a hole in the bank; "
        "slides down muddy banks for fun; pup; can close its ears under water",
        "mole; moles; soft black fur and broad hands; under meadows and gardens; worms and beetles; in a room at the "
        "end of a tunnel; digs all day long; pup; can hardly see",
        "hare; hares; long ears with black tips; in open fields; grass and herbs; in a hollow in the grass; runs in "
        "zigzags when it is followed; leveret; is born with open eyes",
        "deer; deer; long thin legs and gentle eyes; at the edge of the forest; grass, leaves and buds; in the tall "
        "grass; stands still and listens before it eats; fawn; can jump over a high fence",
        "wolf; wolves; grey fur and yellow eyes; in great forests; deer and hares; among rocks and roots; follows its "
        "family for many miles; cub; can smell its food from a mile away",
        "bear; bears; heavy paws and a small tail; in the mountains; fish, berries and honey; in a cave; climbs trees "
        "for honey; cub; eats as much as it can before the winter",
        "beaver; beavers; a flat tail and orange teeth; in rivers and lakes; bark and water plants; in a house of "
        "branches; builds dams across streams; kit; can cut down a tree with its teeth",
        "frog; frogs; smooth green skin and long back legs; in ponds and wet meadows; flies and spiders; in the mud; "
        "sings on warm nights; tadpole; drinks through its skin",
        "butterfly; butterflies; four bright wings; in gardens and meadows; the sweet juice of flowers; under a leaf; "
        "flies from flower to flower; caterpillar; tastes with its feet",
        "swallow; swallows; pointed wings and a forked tail; near farms and villages; flies and other insects; in a "
        "nest of mud; flies to the south in autumn; chick; finds its old nest again every spring",
        "stork; storks; red legs and a long red beak; near wet meadows; frogs, mice and fish; in a great nest on a "
        "roof; claps its beak to say hello; chick; comes back to the same nest for years",
        "robin; robins; a red breast and thin legs; in gardens and parks; worms and berries; in a thick bush; sings "
        "even in winter; chick; follows the gardener to look for worms",
        "crow; crows; shining black feathers; in fields and towns; seeds, worms and scraps; in the top of a tree; "
        "calls loudly when danger is near; chick; remembers a friendly face for years",
        "woodpecker; woodpeckers; a strong beak and a red cap; in old woods; beetles and ants; in a hole in a tree; "
        "knocks on the trunk; chick; has a very long tongue",
        "swan; swans; white feathers and a long neck; on lakes and slow rivers; water plants; in a nest among the "
        "reeds; stays with the same partner all its life; cygnet; is grey when it is young",
        "duck; ducks; a flat beak and wide feet; on ponds and rivers; water plants, worms and snails; in the reeds; "
        "dips its head under the water; duckling; stays dry because its feathers are oily",
        "bat; bats; thin wings and large ears; in caves and attics; moths and flies; upside down under the roof; flies "
        "out when the sun has gone down; pup; finds its way in the dark by listening",
        "seal; seals; smooth fur and round dark eyes; on cold coasts; fish and crabs; on the rocks; dives deep for its "
        "food; pup; can hold its breath for half an hour",
        "whale; whales; a huge body and a broad tail; in the open sea; small fish and tiny shrimps; near the top of "
        "the water; sings long songs in the deep; calf; is not a fish, for it breathes air",
        "dolphin; dolphins; smooth grey skin and a friendly face; in warm seas; fish and squid; near the top of the "
        "water; swims beside ships; calf; calls its friends by name",
        "penguin; penguins; a black back and a white belly; on cold shores; fish; on stones or on the ice; slides over "
        "the snow on its belly; chick; is a bird that cannot fly",
        "elephant; elephants; a long trunk and large ears; in warm, wide lands; grass, leaves and fruit; under the "
        "trees; sprays itself with water; calf; never forgets the way to the river",
        "lion; lions; golden fur and a loud voice; on dry, grassy plains; zebras and antelopes; in the shade of a "
        "tree; rests for most of the day; cub; can be heard from five miles away",
        "giraffe; giraffes; a very long neck and brown patches; on dry plains; the leaves of tall trees; standing up; "
        "reaches leaves that nobody else can reach; calf; sleeps less than two hours a night",
        "camel; camels; a hump on its back and long eyelashes; in the desert; dry grass and thorns; on the warm sand; "
        "carries heavy loads for many miles; calf; can live for days without water",
        "kangaroo; kangaroos; strong back legs and a long tail; on wide, dry plains; grass and leaves; in the shade; "
        "hops faster than a man can run; joey; carries its young in a pouch",
        "turtle; turtles; a hard shell and short legs; in ponds and quiet rivers; plants and small fish; in the mud; "
        "lies in the sun for hours; hatchling; can grow older than a man",
        "parrot; parrots; bright feathers and a curved beak; in hot forests; fruit, nuts and seeds; in hollow trees; "
        "climbs with its beak; chick; can learn to say whole sentences",
        "eagle; eagles; broad wings and sharp eyes; high in the mountains; hares and fish; in a great nest on a cliff; "
        "sails on the wind; eaglet; can see a hare from a mile away",
        "cat; cats; soft paws and long whiskers; in houses and barns; mice and fish; in the warmest place in the "
        "house; washes itself many times a day; kitten; always lands on its feet",
        "dog; dogs; a wet nose and a wagging tail; wherever people live; meat and bread; in front of the door; guards "
        "the house; puppy; can smell things that happened yesterday",
        "horse; horses; a long mane and strong legs; in stables and on meadows; grass, hay and oats; standing up; runs "
        "for joy; foal; shows with its ears how it feels",
        "cow; cows; a wet nose and a long tail; on green meadows; grass and hay; in the barn; chews the same grass "
        "twice; calf; gives more milk when it is happy",
        "sheep; sheep; thick white wool; on hills and meadows; grass and herbs; close to the others; follows the one "
        "in front; lamb; knows the faces of its friends",
        "goat; goats; two horns and a small beard; on hills and rocks; leaves, bark and grass; in a dry shed; climbs "
        "where nobody else can climb; kid; gets bored when it is alone",
        "pig; pigs; a round nose and a curly tail; on farms; corn, roots and apples; on clean straw; rolls in the mud "
        "to keep cool; piglet; is cleverer than many a dog",
        "hen; hens; brown feathers and a red comb; on farms; corn, worms and grass; on a pole in the barn; scratches "
        "in the ground for food; chick; talks to its eggs before they open",
        "donkey; donkeys; long ears and a grey coat; on farms and in dry hills; hay, grass and thistles; in a small "
        "stable; carries wood and water; foal; stops when the way is not safe",
        "goose; geese; a long neck and a loud voice; on farms and lakes; grass and corn; on one leg; guards the yard "
        "as well as a dog; gosling; flies with its friends in the shape of an arrow",
    ),
    # the job; where; a tool; what they do; what they did last
    "job": (
        "baker; in a warm bakery; a wooden shovel; bakes bread, rolls and cakes; baked a cake as big as a wheel",
        "gardener; in the park; a green watering can; plants flowers and cuts the hedges; planted a hundred tulips",
        "shoemaker; in a small shop; a little hammer; mends old boots and makes new ones; made a pair of red boots",
        "teacher; at the village school; a piece of chalk; teaches the children to read and to count; taught us a song",
        "doctor; in a white house; a black bag; looks after everybody who is ill; mended a broken arm",
        "fisher; at the harbour; a large net; goes out to sea before the sun is up; caught a fish as long as a boat",
        "farmer; on a farm outside the town; a strong horse; grows corn, beans and potatoes; sold forty sacks of corn",
        "tailor; in a house full of cloth; a sharp pair of scissors; makes coats, shirts and dresses; made a coat for "
        "the mayor",
        "carpenter; in a workshop behind the house; a saw and a plane; makes tables, chairs and doors; made a cradle "
        "for the neighbours",
        "blacksmith; at the forge; a heavy hammer; makes horseshoes and gates; made a new gate for the church",
        "miller; in the old windmill; a pair of scales; turns corn into flour; carried sixty sacks in one day",
        "mail carrier; in the whole valley; a leather bag; brings letters and parcels; brought a letter from the other "
        "side of the world",
        "clockmaker; in a shop with a hundred clocks; a tiny screwdriver; mends clocks and watches; mended the clock "
        "in the tower",
        "cook; in the kitchen of the inn; a long spoon; makes soup, pies and puddings; cooked supper for eighty guests",
        "painter; in a room under the roof; a fine brush; paints ships and faces; painted the old bridge in the snow",
        "potter; in a shed beside the river; a turning wheel; makes cups, plates and jugs; made a blue jug for my "
        "mother",
        "sailor; on a ship with three masts; a telescope; ties ropes and watches the sea; sailed round the world",
        "librarian; in the town library; a box of small cards; finds the right book for everybody; found a book that "
        "was lost for years",
        "shepherd; on the green hills; a long stick; looks after the sheep and their lambs; carried a lamb home "
        "through the snow",
        "bus driver; in the town; a big round mirror; drives people to work and to school; waited for an old man who "
        "was late",
        "nurse; in the hospital; a clean white apron; helps people to get well; sat all night beside a sick child",
        "beekeeper; behind the orchard; a hat with a veil; looks after the bees and sells honey; filled ninety jars "
        "with honey",
        "musician; in the theatre; an old violin; plays at weddings and dances; played until the sun came up",
        "lighthouse keeper; in a tower by the sea; a bright lamp; shows the ships the way; saved a boat in the storm",
        "engineer; in an office near the station; a sharp pencil; plans bridges and roads; built a bridge without one "
        "nail",
    ),
    "subject": (
        "history; about kings and castles",
        "geography; where the great rivers begin",
        "arithmetic; how to share things fairly",
        "reading; a long poem about the sea",
        "music; a song in three voices",
        "drawing; how to draw a face",
        "nature study; how a seed becomes a tree",
        "writing; how to write a good letter",
        "astronomy; why the moon changes its shape",
        "sewing; how to sew on a button",
        "cooking; how to make a simple soup",
        "gymnastics; how to stand on our hands",
    ),
    "fruit": ("apples", "pears", "plums", "cherries", "grapes", "oranges", "lemons", "strawberries", "peaches", "figs"),
    "vegetable": (
        "carrots",
        "onions",
        "potatoes",
        "beans",
        "peas",
        "cabbages",
        "leeks",
        "pumpkins",
        "beets",
        "turnips",
    ),
    "drink": ("tea", "milk", "cocoa", "water", "apple juice", "lemonade", "warm broth"),
    "dish": (
        *("vegetable soup", "apple pie", "fried fish", "bean stew", "roast chicken", "potato salad", "rice pudding"),
        *("fresh bread with butter", "mushroom soup", "plum cake", "porridge with honey", "onion soup", "fish pie"),
        *("nut cake", "lentil soup", "fruit salad", "gingerbread", "toast with cheese", "cherry pie"),
    ),
    "animal": ("cat", "dog", "goat", "hen", "horse", "donkey", "cow", "goose", "rabbit", "parrot", "pony", "pig"),
    "bird": ("robin", "sparrow", "crow", "blackbird", "swallow", "wren", "magpie", "pigeon", "cuckoo", "lark"),
    "hue": ("red", "blue", "green", "yellow", "white", "black", "brown", "grey", "orange", "purple", "pink"),
    "thing": (
        *("umbrella", "lamp", "basket", "blanket", "chair", "clock", "cup", "drum", "hammer", "hat", "jug", "kettle"),
        *("kite", "ladder", "lantern", "mirror", "pencil", "pillow", "purse", "scarf", "shovel", "spoon", "suitcase"),
        *("table", "teapot", "trumpet", "vase", "violin", "wagon", "watch", "bicycle", "book", "bowl", "box", "broom"),
    ),
    "craft": (
        *("chair", "table", "clock", "wagon", "wooden box", "ladder", "drum", "jug", "lantern", "bicycle", "cupboard"),
        *("bench", "bucket", "vase", "kettle", "cradle", "sledge", "rocking horse", "birdcage", "flower pot"),
    ),
    "want": ("a new [thing]", "some bread", "some [fruit]", "a bag of [vegetable]", "a piece of cheese", "two candles"),
    "ship": (
        *("Swallow", "Grey Gull", "North Wind", "Evening Star", "White Rose", "Morning Light", "Brave Heart"),
        *("Red Robin", "Old Friend", "Southern Cross", "Silver Moon", "Good Hope"),
    ),
    "cloth": ("coat", "scarf", "hat", "jacket", "cloak", "apron", "dress", "shirt", "cap", "sweater"),
    "game": (
        *("chess", "cards", "football", "hide and seek", "dominoes", "marbles", "leapfrog", "tag", "skittles"),
        "blind man's buff",
    ),
    "flower": ("roses", "daisies", "bluebells", "sunflowers", "poppies", "violets", "lilies", "tulips", "snowdrops"),
    "tree": ("oak", "apple tree", "willow", "pine tree", "birch", "chestnut tree", "pear tree", "cherry tree", "elm"),
    "number": ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve", "twenty"),
    "weekday": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "month": (
        *("January", "February", "March", "April", "May", "June", "July", "August", "September", "October"),
        *("November", "December"),
    ),
    "hour": ("six", "seven", "eight", "nine", "ten", "eleven", "two", "three", "four", "five"),
    "year": ("1703", "1750", "1789", "1812", "1825", "1840", "1848", "1866", "1871", "1888", "1899", "1901"),
    "town": (
        *("Millbrook", "Oakfield", "Stonebridge", "Redhill", "Greenford", "Northport", "Ashbury", "Westhaven"),
        *("Riverton", "Fairview", "Kingswood", "Marlow"),
    ),
    # base form; past; what it was like afterwards
    "chore": (
        "sweep the floor; swept the floor; There was not a crumb left.",
        "water the plants; watered the plants; The leaves looked fresh and green again.",
        "wash the dishes; washed the dishes; Every plate was clean.",
        "feed the hens; fed the hens; They ate so fast that the dust flew.",
        "chop the wood; chopped the wood; The pile was as high as the window.",
        "make the beds; made the beds; They were as smooth as a lake.",
        "clean the windows; cleaned the windows; The sun looked in and smiled.",
        "peel the potatoes; peeled the potatoes; The peel went to the pig.",
        "polish the shoes; polished the shoes; They shone like mirrors.",
        "mend the fence; mended the fence; No goat could get through it now.",
        "hang out the washing; hung out the washing; The shirts danced in the wind.",
        "pick the [fruit]; picked the [fruit]; The basket was full and heavy.",
        "fetch the water; fetched the water; The bucket was full to the top.",
        "light the stove; lit the stove; Soon the whole room was warm.",
        "brush the horse; brushed the horse; Its coat shone in the sun.",
        "lay the table; laid the table; There was a flower beside every plate.",
        "rake the leaves; raked the leaves; The heap was taller than a child.",
        "milk the cow; milked the cow; The milk was warm and white.",
        "dust the shelves; dusted the shelves; Everybody had to sneeze.",
        "dig the garden; dug the garden; The robin came at once to look for worms.",
        "tidy the attic; tidied the attic; A family of mice had to move.",
        "paint the gate; painted the gate; Now it was [hue], and so was the cat.",
    ),
    # [h] did something wrong; what came of it; what [h] did about it; what was said
    "mishap": (
        "dropped the milk jug; It broke into three pieces, and the milk ran over the floor; wiped the floor and glued "
        "the pieces together; It is only a jug",
        "forgot the bread in the oven; Black smoke filled the kitchen; opened all the windows and baked another loaf; "
        "The second one is always better",
        "left the gate open; The goats walked out and ate the neighbour's cabbages; drove the goats home and planted "
        "new cabbages; Next time, shut the gate",
        "lost the key; The door was locked, and it was beginning to rain; climbed in through the window; Hang it on a "
        "string from now on",
        "spilled ink on the letter; There was a blue spot in the middle of it; drew two ears and a tail on the spot "
        "and made it a mouse; This is the best letter I have ever had",
        "sat on the hat; It was as flat as a plate; pushed it into shape and put a feather on it; It looks better than "
        "before",
        "took the wrong coat; In its pocket there was a letter to somebody else; carried the coat back and said sorry; "
        "Honest people are worth more than coats",
        "put salt into the cake instead of sugar; Nobody could eat it; laughed, and baked a new one; Taste it first "
        "next time",
        "missed the last bus; The road home was long and dark; walked, and counted the stars on the way; A good walk "
        "never hurt anybody",
        "broke a window with the ball; The glass lay all over the grass; rang the bell and told the truth; Thank you "
        "for telling me",
        "tore a sleeve on the fence; There was a hole as big as a hand; sewed it up with [hue] thread; Now it is the "
        "only coat of its kind",
        "fell into the pond; The ducks were very much surprised; climbed out and ran home to get dry; You look like a "
        "water plant",
        "let the fire go out; It was soon as cold as in a cave; fetched dry wood and lit it again; A fire is like a "
        "pet, it must be fed",
        "gave the wrong answer; Some of the others laughed; looked it up at home and learned it by heart; Nobody "
        "learns without mistakes",
        "overslept; The sun was already high, and everybody had gone; ran all the way without breakfast; The day is "
        "long enough for a late start",
        "painted the door and leaned against it; There was a [hue] stripe from head to foot; painted the rest of the "
        "coat as well; At last it all matches",
        "forgot the way home; All the streets looked the same; asked a policeman, who was very friendly; It is no "
        "shame to ask",
        "let the bird out of the cage; It flew up to the highest branch; sang its favourite song until it came down; "
        "It came back because it likes you",
        "broke a string of the violin; The music stopped with a loud noise; put on a new string and began again; The "
        "second time it was even more beautiful",
        "left the book in the rain; The pages were wet and thick; dried it page by page beside the stove; Now it has "
        "had an adventure of its own",
    ),
    # dish; what it needs; first; then; after that; last
    "recipe": (
        "pancakes; flour, milk and two eggs; mix the flour with the milk; add the eggs and a little salt; heat some "
        "butter in a pan; bake them on both sides until they are golden",
        "vegetable soup; carrots, leeks and potatoes; wash and cut the vegetables; boil a pot of water; put everything "
        "into the pot with a little salt; let it cook for half an hour",
        "apple pie; apples, flour, butter and sugar; peel the apples and cut them up; make a dough of flour and "
        "butter; put the apples on the dough with some sugar; bake it until it smells good",
        "hot cocoa; milk, cocoa and a spoon of sugar; warm the milk slowly; mix the cocoa with the sugar; stir it into "
        "the milk; pour it into a big cup",
        "bread; flour, water, salt and yeast; mix everything in a bowl; press and fold the dough for ten minutes; let "
        "it rest in a warm place; bake it for an hour",
        "plum jam; ripe plums and sugar; take out the stones; cook the plums with the sugar; stir until the jam is "
        "thick; fill it into clean jars",
        "an omelette; three eggs and some cheese; break the eggs into a bowl; beat them with a fork; pour them into a "
        "hot pan; put the cheese on top and fold it",
        "potato salad; potatoes, onions and oil; boil the potatoes; peel them and cut them up; add the onions and the "
        "oil; let it stand for an hour",
        "lemonade; three lemons, sugar and cold water; cut the lemons in half; press out the juice; add the sugar and "
        "the water; stir it well and taste it",
        "baked apples; four apples, nuts and honey; take out the middle of the apples; fill them with nuts and honey; "
        "put them into a dish with a little water; bake them until they are soft",
        "rice pudding; rice, milk and sugar; bring the milk to the boil; add the rice and the sugar; stir it again and "
        "again; let it cook until it is thick",
        "bean stew; beans, onions and a piece of bacon; leave the beans in water for a night; fry the onions and the "
        "bacon; add the beans and fresh water; cook it until the beans are soft",
    ),
    # to do what; what it needs; first; then; after that; last
    "skill": (
        "plant a tree; a young tree and a spade; dig a deep hole; put the tree into it; fill the hole with earth; give "
        "it plenty of water",
        "make a kite; paper, two thin sticks and string; tie the sticks into a cross; glue the paper to the sticks; "
        "add a long tail; wait for a windy day",
        "build a snowman; snow, a carrot and an old hat; roll a very big ball; put a smaller ball on top; add a third "
        "ball for the head; give him the carrot for a nose",
        "wash a dog; warm water, soap and a towel; fill a tub with water; call the dog in a friendly voice; wash it "
        "from its neck to its tail; rub it dry before it shakes itself",
        "make a paper boat; a sheet of paper; fold it in the middle; fold the corners down; turn up the edges; open it "
        "gently and put it on the water",
        "write a letter; paper, a pen and a little time; think of the person; say how you are; tell what has happened; "
        "sign your name and take it to the post",
        "light a fire; paper, small sticks and dry logs; put the paper in the middle; build a little tent of sticks; "
        "light the paper; add the logs when the sticks are burning",
        "feed the birds in winter; seeds and a quiet place; clear away the snow; put out the seeds in the morning; go "
        "away from the window; keep still and watch",
        "grow beans; a pot, some earth and three beans; fill the pot with earth; push the beans into it; put the pot "
        "in the sun; water it a little every day",
        "sew on a button; a needle, thread and a button; pull the thread through the needle; make a knot; sew through "
        "the button six times; cut off the rest of the thread",
        "learn a poem; a poem that you like; read it aloud; learn the first line; add one line after the other; say it "
        "to somebody before you go to bed",
        "wrap a present; paper, scissors and a ribbon; put the present in the middle; fold the paper round it; turn in "
        "the ends; tie the ribbon on top",
        "clean a pair of shoes; a brush, a cloth and some polish; brush off the mud; put a little polish on the cloth; "
        "rub it into the leather; brush them until they shine",
        "draw a cat; a pencil and some paper; draw a big circle; put a smaller one on top; add two ears and a long "
        "tail; draw the whiskers",
    ),
    # the place; seen; heard; smelled; who is there
    "spot": (
        "the harbour; fishing boats with [hue] sails; the cry of the gulls; salt and tar; old men who mended their "
        "nets",
        "the market; heaps of [fruit] and [vegetable]; the voices of the sellers; cheese and fresh herbs; women with "
        "heavy baskets",
        "the station; a long train with [number] carriages; the whistle of the engine; coal and oil; travellers with "
        "suitcases",
        "the library; shelves up to the ceiling; the turning of pages; old paper; a student who had fallen asleep",
        "the park; beds full of [flower]; the music of a small band; cut grass; children with balloons",
        "the farm; a barn with a red roof; the clucking of hens; hay and warm milk; a girl with two buckets",
        "the castle; towers and narrow windows; the wind in the long halls; stone and dust; a guard with a big key",
        "the mill; a wheel as tall as a house; the rush of the water; fresh flour; a miller who was white from head to "
        "foot",
        "the beach; shells and smooth stones; the sound of the waves; salt and seaweed; a boy with a bucket",
        "the forest; ferns and tall trees; a woodpecker far away; moss and mushrooms; a man with a load of wood",
        "the bakery; loaves in long rows; the bell over the door; warm bread; a line of hungry people",
        "the workshop; saws and hammers on the wall; somebody whistling; wood and glue; a carpenter with a pencil "
        "behind one ear",
        "the schoolyard; a [hue] bench under a [tree]; shouting and laughing; chalk and apples; two girls with a rope",
        "the orchard; branches full of [fruit]; the humming of bees; ripe fruit; pickers on long ladders",
        "the museum; old swords and golden cups; soft steps; wax and old wood; a class of tired children",
        "the circus; a tent with [hue] stripes; a drum and two trumpets; sawdust and sugar; a clown with a small dog",
        "the inn; a long table by the fire; songs and loud talk; soup and smoke; guests from far away",
        "the mountain; snow on the highest tops; cow bells; clean air and herbs; a shepherd with a dog",
        "the river; a ferry on a long rope; the splash of a fish; mud and wet grass; women who washed their clothes",
        "the town square; a clock with golden hands; the bell of the tower; roasted nuts; a man who sold newspapers",
        "the garden; rows of [vegetable]; the song of a {lark|robin|blackbird}; wet earth; a gardener with a straw hat",
    ),
    # how it begins; what one could see; what people did; how it ended
    "sky": (
        "It was raining; The streets were wet, and the gutters were running over; People hurried by under their "
        "umbrellas; In the evening the clouds parted, and there was one bright star",
        "It was snowing; The roofs were white, and every sound was soft; The children took out their sledges; By "
        "nightfall the path to the door was gone",
        "It was very hot; The air trembled over the road, and the dogs lay in the shade; Everybody drank cold water "
        "and waited for the evening; At last a cool wind came from the sea",
        "It was a windy day; Hats flew over the walls, and the washing danced on the line; Nobody could keep a door "
        "open; At night the wind fell asleep, and so did everybody else",
        "There was a thick fog; The lamps looked like small moons, and the houses had no roofs; People walked slowly "
        "and called to each other; About noon the sun broke through",
        "It was freezing; There were ice flowers on the windows, and the pond was as hard as stone; Everybody wore two "
        "pairs of socks; The stove was never allowed to go out",
        "It was a bright, clear morning; The sky was blue from one end to the other, and the grass was full of dew; "
        "All the windows stood open; The day was as long as a holiday",
        "There was thunder in the air; The sky was dark yellow, and the birds were silent; The farmers brought in the "
        "hay as fast as they could; Then the first heavy drops fell on the dust",
        "It had stopped raining; There were puddles everywhere, and in each of them was a piece of sky; The children "
        "jumped from one to the next; A rainbow stood over the hills",
        "It was a mild, grey day; The smoke rose straight up, and nothing moved; People worked slowly and talked over "
        "the fence; Nothing happened, and everybody was content",
        "It was a stormy night; The shutters banged, and the old [tree] groaned; Nobody could sleep; In the morning a "
        "branch lay across the road",
        "The first frost had come; The grass was white, and the last apples were hard; People brought their flowers "
        "indoors; In the evening there were fires in all the stoves",
    ),
    # season; its sign; work; a pleasure; food; what comes next
    "season": (
        "winter; snow lay on the fields; the men cut wood in the forest; the children skated on the pond; soup with "
        "bread; spring",
        "winter; the river was frozen; everybody mended tools by the fire; the old people told stories; a bowl of hot "
        "chestnuts; spring",
        "spring; the first [flower] came up; the farmers ploughed the fields; the lambs jumped in the meadow; fresh "
        "spinach; summer",
        "spring; the snow melted on the hills; the windows were washed; the children played outside again; an "
        "omelette; summer",
        "summer; the corn was yellow; the hay was brought in; everybody swam in the lake; a bowl of cherries; autumn",
        "summer; the nights were short and warm; the bees were busy from morning to night; there was dancing in the "
        "square; cold cucumber soup; autumn",
        "autumn; the leaves turned red and gold; the apples were picked; kites flew over the hills; pumpkin soup; "
        "winter",
        "autumn; mist lay in the valley; the potatoes were dug up; the geese flew to the south; mushroom stew; winter",
    ),
    # two traits; what the first did; what the second did; what happened to the first; what happened to the second
    "pair": (
        "hard-working; lazy; got up with the sun and worked in the field; slept until noon under a [tree]; had bread "
        "for the whole winter; had to ask for help when the snow came",
        "careful; bold; looked twice before every step; ran ahead without looking; came home dry and safe; fell into "
        "the river and had to be pulled out",
        "generous; greedy; gave half of the bread to a beggar; ate everything alone in the dark; was given a golden "
        "ring in return; had a stomach ache for three days",
        "patient; hasty; sat by the river and waited; threw stones at the fish; caught a big fish at sunset; went to "
        "bed hungry",
        "quiet; noisy; listened to what the old people said; talked all day long; knew the way when they were lost; "
        "knew nothing but a song",
        "honest; sly; told the whole truth; made up a long story; was believed by everybody; was not believed even "
        "when the story was true",
        "cheerful; gloomy; sang in the rain; complained about every cloud; found friends in every village; walked "
        "alone most of the way",
        "curious; proud; asked about everything; thought that there was nothing left to learn; learned [number] "
        "trades; could do only one thing, and not well",
        "kind; rude; carried an old woman's basket; laughed at her shoes; was shown the short way through the hills; "
        "was sent the long way round",
        "thrifty; careless; put a coin into a jar every week; bought sweets and ribbons; could buy a horse in the end; "
        "had nothing but an empty purse",
        "brave; timid; went into the dark cave with a candle; waited outside and trembled; came out with a box of old "
        "coins; learned that the dark is only the dark",
        "neat; untidy; put every tool back in its place; left everything where it fell; had the roof mended before the "
        "storm; was still looking for the hammer when the rain came",
    ),
    # what happened in the town; what was bad or strange; what the people did; what one can still see
    "event": (
        "the river rose higher than ever before; The water stood in the streets, and people went to church by boat; "
        "They carried their beds to the attic and shared what they had; A line on the bridge still shows how high the "
        "water was",
        "the first train came to [town]; It was so loud that the cows ran away; Everybody stood beside the rails and "
        "waved; The old engine still stands in the station",
        "there was a great fire in [town]; It began in a bakery and burned for two days; People stood in long lines "
        "and passed buckets from hand to hand; Since then all the houses have been built of stone",
        "the winter lasted until May; The birds fell from the trees, and the wells were frozen; The baker gave away "
        "his last flour; An old song still tells of it",
        "a stone bridge was built across the river; It took [number] years, and nobody believed that it would stand; "
        "At last the oldest man in the town walked across it; It stands there to this day",
        "the king visited [town]; It rained so hard that his carriage stuck in the mud; A farmer pulled it out with "
        "two oxen; The oxen are painted on the wall of the town hall",
        "a new clock was hung in the tower; It was always ten minutes late; In the end the people put all their own "
        "clocks back; [Town] is ten minutes late to this day",
        "there was no rain from April to September; The fields turned brown, and the mill stood still; The people dug "
        "a deep well in the square; Its water is still cold and clear",
        "a ship was lost outside the harbour; The captain had not seen the rocks in the fog; The fishermen saved all "
        "[number] sailors; After that the lighthouse was built",
        "the first school was opened in [town]; Some of the farmers wanted their children to work in the fields; The "
        "teacher went from house to house and talked to them; The bell of that school still rings every morning",
        "a comet stood over the hills; It had a long white tail, and many people were afraid; They sat up all night "
        "and told each other stories; One old book still has a picture of it",
        "the harvest was the best of all; There were not enough barns for the corn; Everybody, rich or poor, filled a "
        "sack for the winter; The feast in the square is held every autumn",
    ),
    # a question; its answer
    "asking": (
        "Where are you going; To the market, to buy some [fruit]",
        "What are you doing; I am watching the clouds",
        "Have you seen my [thing]; It is behind the door, where you left it",
        "Why are you laughing; Because the [animal] is wearing your hat",
        "What is in that box; Nothing yet. That is the best thing about it",
        "Are you hungry; I am always hungry when it smells of [dish]",
        "Who taught you that song; My grandfather. He knew a hundred of them",
        "How far is it to [town]; One hour on foot, or two hours if you talk to everybody",
        "What time is it; Time to go home, I think",
        "Do you believe in ghosts; Only at night",
        "May I borrow your [thing]; Yes, if you bring it back on [weekday]",
        "What shall we do tomorrow; The same as today, only better",
        "Is it going to rain; My knee says yes, and my knee is never wrong",
        "Did you sleep well; I dreamed of [dish] and woke up hungry",
        "What do you want to be one day; A [job], because of the tools",
        "Is that your [animal]; No, but it thinks that I am its servant",
        "What did you learn today; That [creature.1] sleep [creature.5]",
        "Can you keep a secret; I can, but my sister cannot",
        "Why is the door open; So that the summer can come in",
        "How old are you; Old enough to carry that basket for you",
    ),
    # a riddle; its answer
    "riddle": (
        "What has a neck but no head; a bottle",
        "What has hands but cannot hold anything; a clock",
        "What gets wetter the more it dries; a towel",
        "What has teeth but cannot bite; a comb",
        "What goes up when the rain comes down; an umbrella",
        "What has one eye but cannot see; a needle",
        "What runs all day and never gets tired; a river",
        "What has leaves but is not a tree; a book",
        "What is full of holes and still holds water; a sponge",
        "What has four legs and cannot walk; a table",
        "What gets bigger the more you take away from it; a hole",
        "What belongs to you but is used more by others; your name",
        "What can you break without touching it; a promise",
        "What comes at night without being called and is lost by day without being stolen; a star",
        "What follows you in the sun and leaves you in the dark; your shadow",
        "What has a tongue but cannot talk; a shoe",
        "What grows shorter the longer it stands; a candle",
        "What flies without wings; time",
    ),
    "greeting": ("Dear", "My dear", "Dear old"),
    "feeling": ("happy", "glad", "proud", "tired", "excited", "cheerful", "content", "sleepy", "thankful", "hungry"),
}

# A paragraph is a template, or sentences with a number n among them. All sentences before n are told, and n of those
# after it, in their order.
SKETCHES: tuple[dict[str, Any], ...] = (
    {  # an animal, described
        "cast": {"r": "kin"},
        "tell": (
            (
                "{The [creature] has [creature.2].|You can tell a [creature] by one thing: it has [creature.2].|A "
                "[creature] is not hard to describe: it has [creature.2].}",
                2,
                "{It lives [creature.3].|It is at home [creature.3].|You can find it [creature.3], if you are "
                "patient.|[Creature.1] live [creature.3].}",
                "It eats [creature.4]{, and it is always looking for more|, and it is not fond of sharing|}.",
                "{At the end of the day|When it is tired}, it sleeps [creature.5].",
                "{A [creature] [creature.6].|It [creature.6], and nobody has to teach it.}",
            ),
            (
                2,
                "A young [creature] is called a [creature.7]. {It has a great deal to learn.|It is very small at "
                "first.}",
                "{Few people know|[R] told me|Our teacher says|I have read in a book} that a [creature] [creature.8].",
                "{Some people are afraid of [creature.1], but there is no need to be.|Many stories are told about "
                "[creature.1], and some of them are true.|In old stories [creature.1] can talk.}",
            ),
            "{Once I drew a [creature] for [r]. [R.he] {laughed|smiled|nodded} and hung it on the wall.|I once asked "
            '[r] {which animal [r.he] would like to be|about [r.his] favourite animal}. "A [creature]," [r.he] said{ '
            'at once|}. "{It knows what it needs, and no more|It is never in a hurry|Nobody tells it what to do}."|I '
            "should like to be a [creature] for one day. I should sleep [creature.5] and eat [creature.4].|When I was "
            "small, I had a toy [creature]. It {sat beside my bed|went everywhere with me}, and its name was "
            "{Button|Biscuit|Mr. Brown|Lady Jane}.}",
        ),
    },
    {  # an animal at home
        "cast": {"h": "pet", "r": "kin"},
        "tell": (
            "{[H.name] is our [h.kind].|Our [h.kind] is called [h.name].|We have a [h.kind]. [H.his] name is "
            "[h.name].} {[H.he] came to us {in [month]|on a rainy day|in a basket|[number] years ago}.|[R] found "
            "[h.him] {in the barn|beside the road|at the market}.} [H.he] is {small|big|fat|thin|old|young} and "
            "{brown|grey|black|yellow}{, with one white {foot|ear}|}.",
            (
                3,
                "In the morning [h.he] {wakes us all|waits at the door|comes into the kitchen and asks for food}.",
                "[H.he] likes [fruit], which is strange for a [h.kind].",
                "[H.his] best friend is a {[bird]|mouse|snail} that lives {in the {shed|attic|garden}|under the roof}.",
                "When it thunders, [h.he] hides {under the table|behind the stove|in a cupboard}.",
                "{Once|Last [month]} [h.he] ate {a whole {cake|cabbage}|half of a hat|my homework}, and {was not sorry "
                "at all|looked very pleased}.",
                "If you say [h.his] name, [h.he] {turns [h.his] head|comes running|pretends not to hear}.",
                "On [weekday]s [r] {brushes|washes} [h.him], and then [h.he] is {angry|proud} for an hour.",
                "{[H.he] can open doors, and closes none of them.|[H.he] can tell the time: at [hour] [h.he] sits in "
                "front of {[h.his] bowl|the door} and waits.}",
            ),
            "{In the evening|When it is cold,|Before we go to bed,} [h.name] lies {by the fire|on the stairs|on "
            "[r.his] feet} and {dreams|sleeps|listens to the clock}. {I would not change [h.him] for {a horse|a bag of "
            "gold|the moon}.|[R] says that there is no better [h.kind] in the world.|What [h.he] thinks of us, nobody "
            "knows.}",
        ),
    },
    {  # a day and its weather
        "cast": {"h": "child folk", "f": "child folk"},
        "tell": (
            "[Sky]. [Sky.1]. {[H.name] stood at the window|[H.name] sat on the stairs|[H.name] looked out} and "
            "{watched|waited|drank a cup of [drink]}.",
            (
                3,
                "[Sky.2].",
                '"{What a day|Look at that}!" said [h.name]. "{It is a good day for [game]|It is a good day for a '
                'book|We could make [dish]}."',
                "{A [bird] sat on the fence and {said nothing|looked cross|waited}.|The [animal] {would not go "
                "out|came in and went to sleep}.}",
                "About [hour] {o'clock |}[f.name] came by {with a [hue] [thing]|with a basket of [fruit]}.",
                "[H.name] and [f.name] {played [game]|made [dish]|sat together and talked} until it was dark.",
                "{In the kitchen|On the stove} a pot of [drink] was getting {warm|ready}.",
            ),
            '[Sky.3]. {"Tomorrow will be different," said [h.name].|[H.name] went to bed early and slept well.|"I '
            'should like to remember this day," thought [h.name].|[H.name] was [feeling], and did not know why.}',
        ),
    },
    {  # a season
        "cast": {"h": "child folk", "r": "kin"},
        "tell": (
            "{When the [season] came, [season.1]|When [season] came, [season.1]|It was [season], and [season.1]|That "
            "year [season] came early, and [season.1]|Every [season] it was the same: [season.1]}. {In the village|On "
            "the farm|In our town} [season.2], and [season.3].",
            (
                3,
                "{On the table there was|At noon there was|In the evening we had} [season.4], and {nobody went "
                "hungry|everybody ate a lot}.",
                "[H.name] wore a [hue] [cloth]{ and was never cold|, which was much too big|, a present from [h.his] "
                "aunt}.",
                "{In the morning|On [weekday]|One day} [h.name] [chore.1]. [Chore.2]",
                '[R] liked the [season] {best of all|more than any other time}. "{It smells of [dish]|One can see the '
                'stars so well|It makes no promises, and it keeps them all}," [r.he] used to say.',
                "The [animal] {grew fat|slept all day|was restless and looked at the sky}.",
                "A [bird] {sang on the roof|built a nest over the door|looked in at the window}.",
            ),
            "{So the weeks went by, one after the other.|The days came and went.|It did not last long.} {One "
            'morning|One day} there was something new in the air. "Do you smell that?" {said|asked} [h.name]. {And '
            'then it was [season.5].|"[Season.5] is coming."|"I think that [season.5] is on the way."}',
        ),
    },
    {  # a place
        "cast": {"h": "child folk", "r": "kin"},
        "tell": (
            "{Once a week|Every [weekday]|On the first day of the month|After school|Before supper} [h.name] "
            "{went|walked} to [spot]. {It was not far from [h.his] house.|The way there took half an hour.|It was "
            "[h.his] favourite place.|Nobody knew why.}",
            "{One could see [spot.1].|First of all [h.he] saw [spot.1].|[H.he] liked to look at [spot.1].} {[H.name] "
            "stood still and heard [spot.2].|From somewhere came [spot.2].} {The air smelled of [spot.3].|There was a "
            "smell of [spot.3].}",
            (
                2,
                "There was also {a [animal]|a [bird]|an old [animal]} that {belonged to nobody|knew everybody|was "
                "always in the way}.",
                "{On that day|This time} [h.he] saw [spot.4] there. [H.name] said good day{, and they talked about the "
                "weather|, and got a friendly answer|}.",
                "[H.name] had {[fruit]|a piece of bread|[number] nuts} in [h.his] pocket, and {ate slowly|shared with "
                "whoever was there}.",
                "On the way [h.he] found a [hue] [thing]. {Somebody had forgotten it.|It was old, but it was not "
                "broken.} [H.name] {gave it to the first person [h.he] met|put it where everybody could see it}.",
            ),
            '{When the bell rang,|When it grew dark,|After an hour} [h.name] went home. {"Where have you been?" asked '
            'a neighbour. "{Nowhere special|Where I always go},"|"What did you see?" asked a neighbour. '
            '"{Everything|Nothing special|The same as always},"} said [h.name], {and was [feeling]|and thought of '
            "[spot]}.",
        ),
    },
    {  # how to cook something
        "cast": {"r": "kin", "h": "child"},
        "tell": (
            "{This is how [r] makes [recipe].|If you want to make [recipe], you need [recipe.1].|[R] taught me how to "
            "make [recipe].|Nothing is easier than to make [recipe].}{ You need a little time as well.| It is not "
            "hard.| Even a child can do it.|}",
            "{First|To begin with}, [recipe.2]. {Then|Next,} [recipe.3]. {After that,|Now} [recipe.4]. {Last of "
            "all|Finally}, [recipe.5].",
            (
                1,
                "{Be careful, for everything is hot.|Do not forget to wash your hands.|Taste it before you bring it to "
                "the table.} {When it is ready, call the others.|Eat it while it is warm.|It is best when it is "
                "shared.}",
                '"{How do you know when it is ready|How long does it take}?" I asked{ once|}. "{When the [animal] '
                'comes into the kitchen|As long as it takes|When everybody is standing round the table}," said [r].',
                "[H.name] once made it {without looking|much too fast|with salt instead of sugar}. {Even the [animal] "
                "would not eat it.|We laughed about it for years.|We ate it, and said nothing.}",
            ),
        ),
    },
    {  # how to do something
        "cast": {"r": "kin", "h": "child"},
        "tell": (
            "{Do you know how to [skill]?|It is not difficult to [skill].|On [weekday] [r] showed me how to "
            "[skill].|If you want to [skill], take your time.} {You need [skill.1].|All you need is [skill.1].}",
            "{First|To begin with}, [skill.2]. {Then|Next,} [skill.3]. {After that,|Now} [skill.4]. {Finally|Last of "
            "all}, [skill.5].",
            '{[H.name] tried it, too. "{It does not work|Mine looks different}," said [h.he]. "{Begin again|Do it once '
            'more}," said [r], and {the third time|the second time} it was right.|The first time it may go wrong. '
            "{That does not matter.|It went wrong for everybody at first.} {Begin again.|Try once more.}|When [r] was "
            'young, every child could do it. "{And you can do it, too|It is never too late to learn}," [r.he] '
            "said.|[R] can do it with closed eyes. I need {all my fingers|a whole afternoon}, but I can do it.}",
        ),
    },
    {  # a letter
        "cast": {"h": "child", "f": "child", "r": "kin", "s": "child"},
        "tell": (
            "[Greeting] [f.name],",
            "{How are you?|I hope that you are well.|Thank you for your letter.|It is a long time since I wrote to "
            "you.} {We are all well.|I am well, and so is the [animal].|I have had a cold, but I am better now.} {It "
            "is [month] here, and {it rains every day|the sun is shining|it is cold and clear|there is a strong "
            "wind}.|Since [weekday] it has {rained every day|been very hot|been cold and clear}.}",
            (
                3,
                '{Yesterday|On [weekday2]|Last week} I [mishap]. [Mishap.1]. I [mishap.2]. "[Mishap.3]," said [r].',
                "At school we are learning [subject.1]. {I like it.|It is harder than I thought.|The others laugh, but "
                "I like it.}",
                "[R] has {bought|found|been given} a [hue] [thing]. {[R.he] is very proud of it.|Nobody knows what it "
                "is for.|[R.he] shows it to everybody.}",
                "We went to [spot]. I saw [spot.1], and it smelled of [spot.3].",
                "I have a new friend. [H.he] is called [h.name], and [h.he] can {play [game] very well|draw "
                "horses|swim like a fish|whistle|make a kite}.",
                "{Every day|In the mornings} I have to [chore]. {I do not mind.|It is not my favourite work.}",
                "We have {a [animal2]|[number] {hens|geese|goats|rabbits}} {in the garden|behind the house} now. {You "
                "would like that.|You must come and see.}",
            ),
            "{When will you come to see us?|Please write soon.|Can you come in [month2]?|What are you doing now?} {We "
            "could play [game2].|I will show you everything.|There is enough room for you.|[R] will make [dish].}",
            "{Your friend|Yours|With love}, [s.name]",
        ),
    },
    {  # two of a family, unlike each other
        "cast": {"h": "child", "f": "=h"},
        "tell": (
            "{The two [h.brother]s [h.name] and [f.name] {lived with their mother [where]|had a small house "
            "[where]|were seldom seen apart}.|There were once two [h.brother]s, [h.name] and [f.name].|[H.name] and "
            "[f.name] were [h.brother]s.|Two [h.brother]s, [h.name] and [f.name], lived [where].} {One was [pair.0], "
            "and the other was [pair.1].|[H.name] was [pair.0], but [f.name] was [pair.1].|They looked alike, but "
            "[h.name] was [pair.0] and [f.name] was [pair.1].}",
            "{[Day]|One day|One year} {their mother sent them {out into the world|to [town]|over the hills}|they set "
            "out together|they were left alone for a week}. {So it was as always: |}[H.name] [pair.2]. [F.name] "
            '[pair.3]. {"Why do you do that?" asked [f.name]. "Wait and see," said [h.name].|"You will be sorry," said '
            '[h.name]. "We shall see," said [f.name].|They did not speak about it.}',
            "{And what came of it?|In the end it came as it had to come.|Time went by.} [H.name] [pair.4]. [F.name] "
            "[pair.5].",
            '{"You were right," said [f.name]{ quietly|}. "{Teach me|Next time I will do as you do}."|[H.name] did not '
            'laugh. "{You are my [h.brother]|What is mine is yours}," [h.he] said{, and they shared '
            "everything|}.|After that [f.name] changed a little, and [h.name] was patient.|Their mother looked at them "
            'both. "I am glad that I have two of you," she said.|And from then on [f.name] listened to [h.name], at '
            "least on [weekday]s.}",
        ),
    },
    {  # a town remembers
        "cast": {"r": "kin", "h": "child"},
        "tell": (
            "{In the year [year]|Long ago, in [year],|In the year when my {grandmother|grandfather} was born,|A "
            "hundred years ago|Many years ago} [event]. [Event.1].",
            (
                2,
                "{Nobody|No one} {had ever seen anything like it|knew what to do|could remember anything like it}.",
                '"{It will pass|We shall see}," said the mayor, who {was a baker|was a tailor|had a long white beard}.',
                "A little [h.boy] called [h.name] wrote everything down in a [hue] book.",
                "Some people {prayed|sang|wept}, and some {laughed|packed their things}.",
            ),
            "[Event.2]. [Event.3].",
            '{When I was small, [r] told me about it. [R.he] had it from {an old neighbour|[r.his] own mother}.|"{Is '
            'that true|Is it really true}?" I once asked [r]. "{As true as I am sitting here|Most of it}," [r.he] '
            "said.|I have often thought about it.|If you go to [town], ask the people there. Everybody tells it a "
            "little differently.}",
        ),
    },
    {  # somebody remembered
        "cast": {"r": "kin", "h": "child"},
        "tell": (
            "{My [r.kind] was a [job].|My [r.kind] worked as a [job].|[R] was a [job] and lived [where].|I often think "
            "of my [r.kind]. [R.he] was a [job].} {[R.he] worked [job.1] and always had [job.2] with [r.him].|You "
            "could find [r.him] [job.1], with [job.2] in [r.his] hand.|All day long [r.he] was busy [job.1].}",
            (
                3,
                "{Once|One year|In the winter of [year]} [r.he] [job.4]. {Everybody talked about it.|[R.he] never "
                "spoke of it.|[R.he] told us about it every [month].}",
                "On [weekday]s [r.he] made [dish], and the whole house smelled of it.",
                "[R.he] wore a [hue] [cloth], in summer and in winter.",
                "[R.he] had {a [animal]|an old [animal]} that {followed [r.him] everywhere|listened to [r.him]|was "
                "older than I was}.",
                "[R.he] could not {sing|swim|dance}, but [r.he] {tried it all the same|did not know it}.",
                "In [r.his] garden there were [flower] and [vegetable].",
                "[R.he] taught me how to [skill].",
                '"{A day without a good meal|A day without laughing|A day without work} is only half a day," [r.he] '
                "used to say.",
            ),
            "{I still have [r.his] [thing]. It stands {on my table|beside the door}, and I {think of [r.him] when I "
            "see it|would not sell it}.|When I smell {[dish]|[flower]}, I think of [r.him].|I am older now than [r.he] "
            "was then, and I understand [r.him] better.}",
        ),
    },
    {  # work
        "cast": {"h": "folk"},
        "tell": (
            "[H.name] is a [job]. [H.he] works [job.1], and [h.he] [job.3]. {[H.he] gets up at {five|six|seven}.|The "
            "work begins at {six|seven|eight|nine}.|[H.he] learned it from [h.his] {father|mother}.}",
            (
                2,
                "[H.his] most important tool is [job.2]. {Without it [h.he] could do nothing.|It belonged to [h.his] "
                "{father|mother|teacher}.|Nobody else may touch it.}",
                "At noon [h.he] eats {bread and cheese|[dish]|a plate of [vegetable]} and {reads the newspaper|sleeps "
                "for ten minutes|drinks a cup of [drink]}.",
                "{People come from [town] to see [h.him].|Everybody knows [h.him].|Children like to watch [h.him].}",
                "It is not easy work. {In winter [h.his] hands are cold.|In the evening [h.his] back hurts.|Some days "
                "are very long.} But {[h.he] does not complain|[h.he] is proud of it|[h.he] would not do anything "
                "else}.",
            ),
            '{Last [month]|Last year|Last week|Once} [h.he] [job.4]. {"That was {a good day|the best day of all}," '
            '[h.he] says.|[H.he] still {talks|laughs} about it.|People thanked [h.him] with a [hue] [thing].} {"Do you '
            'ever get tired of it?" I asked. "{Never|Every evening, and never in the morning}," said [h.name].|"What '
            'would you like to do one day?" I asked. "This," said [h.name].|I should like to be a [job], too.}',
        ),
    },
    {  # a small misfortune
        "cast": {"h": "child child folk", "r": "kin", "f": "child"},
        "tell": (
            "{On [weekday]|On [weekday] morning|Yesterday|Last [weekday]|One day in [month]} [h.name] [mishap]. "
            '[Mishap.1]. {"Oh dear!" said [h.name].|"Oh no!" cried [h.name].|[H.name] did not know whether to laugh or '
            "to cry.|For a moment nobody said a word.|Luckily nobody was hurt.}",
            (
                1,
                "{A [bird]|The [animal]} looked on and seemed to {laugh|wonder}.",
                '"{What has happened|What was that}?" called [f.name] from {the next room|the garden|across the '
                'street}. "Nothing," said [h.name], {which was not quite true|and turned red}.',
                '{[F.name] saw it and came to help.|"That happens to me, too," said [f.name]. "Come, I will help '
                'you."}',
            ),
            "{Then|After a while|There was only one thing to do:} [h.he] [mishap.2]. It {took a while|took longer than "
            "[h.he] thought|was not easy}{, but it was worth it|, but then everything was all right again|}.",
            '{"[Mishap.3]," said [f.name]{ with a smile|, and both of them laughed|}.|"[Mishap.3]," said [h.his] '
            'mother, and she was not angry.|In the evening [h.name] told the whole family. "[Mishap.3]," they said.} '
            "{There was [dish] for supper.|And that was that.|[H.name] went to bed [feeling].|The next day nobody "
            "thought of it any more.}",
        ),
    },
    {  # a talk
        "cast": {"h": "child folk animal", "f": "child folk animal"},
        "tell": (
            "{[H.name] and [f.name] {sat on a bench|stood at the gate|were waiting at the bus stop|were walking along "
            "the river|sat under a [tree]}.|[H.name] met [f.name] {at [spot]|on the bridge|in front of the bakery}.} "
            "{It was [weekday].|It was getting late.|The sun was low.|Neither of them was in a hurry.}",
            '"[Asking]?" asked [f.name].\n"[Asking.1]," said [h.name].\n{"I see," said [f.name].|"That is good," said '
            '[f.name], and nodded.|[F.name] thought about that.|"Aha," said [f.name], and was silent for a while.}',
            '"[Asking2]?" asked [h.name].\n"[Asking2.1]," said [f.name].{\n[H.name] laughed. "{That is a good answer|I '
            'like that}."|\nThey were both silent. {A [bird]|A [animal]} {walked|went} by.|}',
            '{|"[Asking3]?" asked [f.name].\n"[Asking3.1]," said [h.name].}',
            "{Then they {went home|walked on|said good night}{, one to the left and one to the right|, each with a "
            'smile|}.|"Shall we talk again tomorrow?" asked [f.name]. "{Of course|Yes, at [hour]}," said [h.name].|"{I '
            'must go|It is late}," said [h.name]. "{Good night|See you on [weekday2]}," said [f.name].|They shared '
            "some [fruit], and the evening was {mild|quiet|long}.}",
        ),
    },
    {  # a school day
        "cast": {"h": "child", "f": "child", "t": "teacher"},
        "tell": (
            "{The bell rang at {eight|nine}|School began at {eight|nine}|On [weekday] the class had [subject] first}. "
            "{[H.name] sat beside [f.name], {near the window|in the last row|behind the stove}.|[H.name] came in last "
            "and was out of breath.|It smelled of {chalk|wet coats|apples}, as always.} [T.name] wrote a {long "
            "word|date|question} on the board.",
            (
                3,
                '"Today we shall learn [subject.1]," said [t.name]. {[H.name] was glad.|[F.name] sighed.|Everybody '
                "took out a pencil.}",
                "[H.name] {raised [h.his] hand|knew the answer|was looking out of the window}. {A [bird] sat on the "
                "wall outside.|A [animal] walked across the yard.}",
                '"What is the matter, [f.name]?" asked [t.name]. "I have {lost|forgotten} my '
                '{pencil|book|ruler|apple|cap|notebook}," said [f.name]. "You can have mine," said [h.name].',
                '"Who can tell me something about [creature.1]?" asked [t.name]. "A [creature] [creature.8]," said '
                '[h.name]. "{Quite right|Very good}," said [t.name].',
                "Then they had {arithmetic|singing|writing}. {How much is [number] and [number2]? Nobody wanted to say "
                "it.|It went well.}",
                "In the break they played [game] {in the yard|under the [tree]}, and [f.name] won.",
                "[H.name] had {bread|an apple|cake} with [h.him], and shared it with [f.name].",
            ),
            "{When school was over,|At noon|In the afternoon} {they walked home together|[h.name] ran home|it was "
            'raining, and they ran}. {"What did you learn?" asked [h.his] {mother|father|grandmother}. "{[Subject.1]|A '
            'great deal|How to wait},"|"How was it?" asked [h.his] {mother|father|grandmother}. "{Good|Too long|As '
            'always},"} said [h.name]{, and asked what there was to eat|}. {There was [dish].|}',
        ),
    },
    {  # a diary
        "cast": {"h": "child", "r": "kin", "f": "child"},
        "tell": (
            "{[Weekday], the {first|second|third|fifth|tenth|twelfth|twentieth} of [month].|[Weekday].|It is [weekday] "
            "evening.} [Sky]. {I got up at [hour].|I woke up late.|I slept badly.|I was awake before everybody else.} "
            "{Then I|After breakfast I} [chore.1]. [Chore.2]",
            (
                3,
                "[F.name] came, and we {played [game]|made [dish]|went to [spot]}. {[F.he] is my best friend.|We "
                "quarrelled, and then we laughed.|It was great fun.}",
                "Yesterday I [mishap]. [Mishap.1]. I [mishap.2]. {I hope that nobody saw it.|It was not so bad.}",
                "[R] is {ill|in bed|tired}. {I made [r.him] some [drink].|I read to [r.him] for an hour.}",
                "In the night I dreamed of a [creature]. It was {quite close|smaller than I thought|sitting on my "
                "bed}.",
                "There was [dish2] for dinner. I ate {too much|two plates of it|three plates of it|only a little}.",
                "I found a [hue] [thing] {in the attic|on the way|behind the house}, and I shall keep it.",
            ),
            "{Now it is dark, and I am [feeling].|Now I must put out the light.|That was my day.} {Tomorrow I want to "
            "[chore3].|Tomorrow is [weekday2].|I wonder what tomorrow will bring.|Good night.}",
        ),
    },
    {  # things have a history
        "cast": {"h": "child folk", "f": "child folk"},
        "tell": (
            "{[H.name] had a [hue] [craft].|In the room of [h.name] stood a [hue] [craft].|There was once a [hue] "
            "[craft] that belonged to [h.name].} {It was not new.|It was older than [h.name].|Nobody knew where it "
            "came from.|It had once belonged to a [job].} {[H.name] used it every day.|It was never used.|[H.name] was "
            "very fond of it.}",
            "{One day|On [weekday]|One evening in [month]} the [craft] {was gone|had disappeared}. {[H.name] looked "
            "{under the bed|behind the door}, {in the cupboard|on every shelf} and in the garden.|[H.name] was sad and "
            'could not eat.} "{Who could want an old [craft]|What can have happened}?" [h.he] asked. {The [animal] '
            "knew, but it could not speak.|Nobody knew.}",
            'Then [f.name] came {in|to the door}. "I {took|have} it," [f.he] said. "{I wanted to mend it for you|It '
            'needed some paint|I only wanted to make it beautiful}." And there it was again, in the middle of the '
            "room. Now it was {[hue2]|[hue2] and [hue3]}, and {it shone|it was as good as new}.",
            '{[H.name] did not know what to say.|"It is wonderful," said [h.name].|"I liked the old colour," said '
            '[h.name], "but I like this one, too."} {From that day on it belonged to both of them.|And it stands there '
            "still.|That evening they had [dish] together.}",
        ),
    },
    {  # a journey
        "cast": {"h": "child folk", "f": "child folk animal"},
        "tell": (
            "{In [month]|One [weekday]|Early in the morning} [h.name] {took the train to [town]|set out for "
            "[town]|went on board a ship to [town]|left the house with a [hue] suitcase}. {[H.he] wanted to visit "
            "[h.his] {aunt|uncle|old teacher}.|[H.he] had never been so far from home.|It was a long way.} [H.his] "
            "neighbour had given [h.him] {bread and [fruit]|a [cloth]|a map}.",
            (
                3,
                '{On the way|After an hour} [h.he] met [f.name]. "{Where are you going|May I sit here}?" asked '
                '[f.name]. "{To [town]|Of course}," said [h.name], and they {became friends|talked the whole way}.',
                "[H.name] saw {[number] [bird]s|fields of [vegetable]|hills and woods} and {could not stop "
                "looking|counted the houses}.",
                "[Sky]. [Sky.1].",
                "They {played cards|played chess|played dominoes|told each other stories} and ate [fruit2].",
                "At noon {everything stopped|they stopped}. {There was a [animal] in the way.|Nobody knew why.} "
                "[H.name] {waited|laughed|slept a little}.",
            ),
            "{In the evening|When the lamps were lit,|At [hour] o'clock} [h.name] {arrived|was there}. [H.he] saw "
            '[spot.1] and heard [spot.2]. {"There you are at last!" somebody called.|Somebody was waiting with a '
            'lantern.|"So this is [town]," said [h.name].} {There was [dish], and a warm bed.|That night [h.he] wrote '
            "a long letter home.|It was the best journey of [h.his] life.}",
        ),
    },
    {  # buying
        "cast": {"h": "child folk", "t": "folk"},
        "tell": (
            "[H.name] {needed|wanted to buy|had to buy} [want]. [H.he] had [number] coins in [h.his] pocket. {On "
            "[weekday] [h.he] went to the market.|So [h.he] went to the shop at the corner.} {It was full of "
            "people.|It was early, and nobody else was there.}",
            '"{Good morning|Good day}," said [t.name], who {kept the shop|stood behind the table}. "{What can I do for '
            'you|What would you like}?"\n"[Want], please," said [h.name]. "{But not too dear|The best you have, if I '
            'may ask}."\n"{I have something better|Let me see}," said [t.name], and {brought out|showed [h.him]} a '
            "[hue2] [thing2].",
            '{[H.name] thought for a while.|[H.name] laughed.|[H.name] looked at it from all sides.} "{I did not want '
            'that|That is not what I came for}," [h.he] said, "but I like it." {So [h.he] {bought|paid for} the '
            '[thing2]{ and went home|}.|"Take it," said [t.name]. "It has waited for you."}',
            '{At home everybody was surprised. "Did you not want to buy [want]?" they asked.|"What is that for?" asked '
            '[h.his] {brother|sister}. "{I do not know yet|You will see}," said [h.name].|And that is why there is a '
            "[hue2] [thing2] in [h.his] kitchen.} {In the end they ate [dish], and nobody was angry.|It was a good "
            "day.|}",
        ),
    },
    {  # night
        "cast": {"h": "child", "r": "kin"},
        "tell": (
            "{It was late, and [h.name] could not sleep.|It was a dark night, and [h.name] lay awake.|[H.name] woke up "
            "in the middle of the night.|The moon shone into the room where [h.name] lay.} {The clock struck "
            "{one|two|eleven|midnight}.|Everything was quiet.|Outside, the wind was blowing.|The house was full of "
            "small noises.}",
            (
                2,
                "[H.he] counted {sheep|stars|the roses on the wall}: one, two, three, four. {At a hundred [h.he] was "
                "still awake.|It did not help.}",
                "Something {scratched at the door|moved behind the curtain|knocked on the window}. {It was only the "
                "[animal].|It was only a branch of the [tree].|It was only a [bird].}",
                '"Are you asleep?" [h.he] whispered to [h.his] {brother|sister}. "Yes," said a sleepy voice.',
                "[H.he] went down to the kitchen in [h.his] bare feet. There sat [h.his] "
                "{grandmother|grandfather|mother} with a cup of [drink].",
                "{[H.he] looked out.|[H.he] opened the window.} {A hedgehog|A fox|A badger|A hare|A black cat|A "
                "goose|A deer} was walking across the {yard|road|garden} as if it owned the world.",
            ),
            '{[H.he] lay down again and thought of [spot].|"Tell me something," said [h.name]. So [h.his] mother told '
            "[h.him] about [creature.1], and how a [creature] [creature.8].|[H.he] thought of everything that had "
            "happened on [weekday].} {Slowly [h.his] eyes closed.|Before it was over, [h.he] was asleep.|When [h.he] "
            "opened [h.his] eyes again, it was morning.} {The sun was shining on a [hue] [thing].|There was a smell of "
            "[dish].|A [bird] was singing.|}",
        ),
    },
    {  # a garden
        "cast": {"h": "child folk", "f": "child folk"},
        "tell": (
            "{Behind [h.his] house [h.name] had a garden.|[H.name] had a small garden {near the river|behind the "
            "church|[where]}.|Nobody had such a garden as [h.name].} {[Vegetable], [flower] and one old [tree] grew in "
            "it.|There grew [flower] and [vegetable].}",
            (
                3,
                "In [month] [h.he] {dug the beds|put the seeds into the earth|cut the hedge}.",
                "Every {morning|evening} [h.he] watered the [flower2] and talked to them.",
                "{A hare|A deer|A badger|A snail|A goat|A goose} came at night and ate the [vegetable]. {[H.name] "
                'built a fence.|"There is enough for both of us," said [h.name].}',
                '[F.name], the neighbour, {looked over the wall|shook [f.his] head}. "{Mine are bigger|You work too '
                'much}," [f.he] said.',
                "Then it did not rain for [number] weeks, and [h.name] carried water from the {river|well}.",
                "A [bird] built its nest in the [tree], and [h.name] {went past on tiptoe|put out seeds}.",
            ),
            "{In autumn|When summer was over,|In September} there were so many [vegetable] that [h.name] {gave some to "
            'everybody|filled [number2] baskets}. {[F.name] got the {biggest|best} ones. "I never said thank you," '
            'said [f.name]. "You have just done it," said [h.name].|They made [dish] and ate it under the [tree].|"It '
            'is the sun that does it," said [h.name], "and a little work."}',
        ),
    },
    {  # waiting for somebody
        "cast": {"h": "child folk animal", "f": "child folk"},
        "tell": (
            '[H.name] {was waiting for [f.name]|sat on the steps and waited|looked at the clock again}. {"At [hour] '
            'o\'clock," [f.name] had said, "at [spot]."|[F.name] was late.|It was [weekday], and [f.name] always '
            "came on [weekday]s.}",
            (
                2,
                "[H.he] looked {up the street|to the left and to the right}. {There was only a [animal].|A [job] came "
                "by, but not [f.name].}",
                "[Sky]. [Sky.2].",
                '{"Perhaps [f.he] has forgotten me," thought [h.name].|"Perhaps [f.he] has lost the way," thought '
                '[h.name].|"Perhaps it is the wrong day," thought [h.name].}',
                "[H.name] counted {the steps|the clouds|the windows} and got as far as {forty|sixty|a hundred}.",
            ),
            '{Then somebody called.|At last [f.name] came round the corner.|Suddenly there were quick steps.} "I am so '
            'sorry," said [f.name]. "I {[mishap]|had to [chore]|forgot the time}." {[F.he] was out of breath.|There '
            "was mud on [f.his] boots.|In [f.his] hand [f.he] had a [hue] [thing].}",
            '{"It does not matter," said [h.name]. "You are here now."|[H.name] wanted to be angry, but [h.he] had to '
            'laugh.|"I have only just come," said [h.name], which was not true.} {And they went to eat [dish].|Then '
            "they {played [game]|talked} until it was dark.|}",
        ),
    },
    {  # a contest
        "cast": {"h": "child animal", "f": "child animal", "g": "child folk"},
        "tell": (
            "{Who can {run the fastest|sing the loudest|jump the furthest|tell the best story|build the highest "
            "tower|carry the most water}?|Who is the best at [game]?|Who makes the best {soup|apple pie|plum "
            "jam|bread}?} {That was the question in [town]|Everybody in the village wanted to know}. {On [weekday]|On "
            "the first of [month]} they all met {at [spot]|under the [tree]|in the square}. {The prize was a [hue] "
            "[thing].|The winner was to get a [thing] and a basket of [fruit].}",
            '[H.name] {had practised for weeks|was nervous|had not slept}. "{I shall win|Nobody can beat me}," said '
            '[f.name]. {"We shall see," said [h.name].|[H.name] said nothing.} [G.name] {gave the sign|rang a bell}, '
            "and they began.",
            "{At first [f.name] was {better|faster}. Then [f.he] made a mistake, {because [f.he] was looking at "
            "[h.name]|because [f.he] was too sure of [f.himself]}.|For a long time nobody could say who was "
            "better.|[H.name] stayed calm and did not look up.} {Everybody held their breath.|A child laughed.|Even "
            "the [animal] was quiet.}",
            '{"[H.name] has won!" called [g.name].|"You are both winners," said [g.name].|In the end it was [f.name] '
            'who won, but only just.} {They shook hands.|"That was fun," said [f.name]. "Let us do it again."|They '
            "shared the prize.} {In the evening they ate [dish2] together.|And next year there will be another "
            "contest.|}",
        ),
    },
    {  # the sea
        "cast": {"h": "captain", "f": "child"},
        "tell": (
            "{The old captain|[H.name]} {stood on deck|looked at the sea|sat at the table with a map}. {The [ship] had "
            "been at sea for [number] weeks|The [ship] was three days from [town]|The [ship] carried [fruit] and "
            "[drink]}. {The wind came from the {north|south|west|east}.|There was no wind at all.|The sky was "
            "{black|red|full of stars}.|It was a dark night.}",
            (
                3,
                '"{What do you see|What is out there}?" {called|asked} the captain. "{Nothing but water|A light, far '
                'away|A whale, I think|An island, I think|The end of the world, I think}," said [f.name], the youngest '
                "sailor.",
                "The waves {grew higher|came over the deck|were like hills}. {A barrel broke loose.|The smallest sail "
                "was torn.|The cook held on to his pot.}",
                "The sailors {sang|played cards|played dominoes|mended the sails|told each other stories of home}.",
                '[F.name] was {ill|afraid|homesick}. "That passes," said the captain, and gave [f.him] {a piece of '
                "bread|a cup of [drink2]|a [hue] [cloth]}.",
                "The ship's [animal] {slept on a rope|sat beside the wheel|was the only one who was not afraid}.",
            ),
            "{In the morning|On the fourth day|At sunrise} they saw land. {There were green hills and white houses.|It "
            'was a small island with one [tree].|It was [town].} "Land," said the captain, {and took off [h.his] '
            "cap|and said no more}. {That evening there was [dish] for everybody.|[F.name] never forgot it.|But a week "
            "later they were at sea again.}",
        ),
    },
    {  # somebody new
        "cast": {"h": "child", "f": "child", "r": "kin"},
        "tell": (
            "{A new family moved into the [hue] house|The house next door was no longer empty|Somebody had moved in "
            "across the street}. [H.name] {watched from the window|sat on the wall|stood behind the hedge} and saw {a "
            'cart full of furniture|a [hue2] [thing] and a [animal]|[number] boxes}. {"I wonder who they are," said '
            "[h.name].|Nobody had told [h.name] about it.}",
            (
                "Then a [f.boy] came out. {[F.he] wore a [hue3] [cloth]|[F.he] carried a [bird] in a cage|[F.he] had a "
                '[thing2] in [f.his] hand}, and [f.he] looked {sad|shy|curious|cross}. "Who are you?" asked [h.name]. '
                '"I am [f.name]," said the [f.boy]. "We come from [town]."',
                1,
                "At first neither of them {said a word|knew what to say}. {Then the [animal2] sneezed, and they both "
                "laughed.|Then it began to rain, and they ran under the same [tree].}",
                '"Do you like [game]?" asked [h.name]. "{I have never played it|I like it more than anything}," said '
                "[f.name].",
            ),
            "{In the evening|An hour later|Before supper} they were {friends|still talking|sitting on the wall, side "
            "by side}. {[H.name] showed [f.name] the {best tree|short way to the river|hole in the fence}.|[F.name] "
            "told [h.name] about [town], where {everybody has a boat|the trains never stop|it is always windy}.} {Now "
            'they go to school together.|"Come again tomorrow," said [h.name].|And when [f.name] laughed, [h.name] was '
            "[feeling].}",
        ),
    },
    {  # learning something
        "cast": {"h": "child", "t": "folk", "f": "child"},
        "set": {
            "art": ("swim", "ride a bicycle", "whistle", "play the violin", "dance", "skate", "row a boat", "juggle")
        },
        "tell": (
            "{[H.name] could not [art].|All the others could [art], but not [h.name].|[H.name] wanted to learn how to "
            '[art].} {"I shall never learn it," [h.he] said.|"Is it hard?" [h.he] asked everybody.|[H.he] was a little '
            "ashamed of it.} [T.name], {who lived next door|who was very old|an old friend of the family}, heard about "
            'it. "{Come to me on [weekday]|I will teach you}," said [t.name].',
            (
                2,
                "The first day was {terrible|hard}. {Everything went wrong.|[F.name] stood there and laughed.|[H.name] "
                'wanted to give up.} "{Again|Once more}," said [t.name].',
                '"Do not think of your {feet|hands|face}," said [t.name]. "Think of {[spot]|[dish]|a [bird]}." That '
                "helped{ a little|}.",
                "After [number] days it was {better|no better}. [H.name] practised {in the morning and in the "
                "evening|until it was dark|even in the rain}.",
                "At night [h.he] dreamed about it. {In the dream it was quite easy.|A [creature] was teaching "
                "[h.him].}",
            ),
            "{Then, one day in [month],|On the {third|fifth|tenth|last} day,|And suddenly} [h.he] could do it. {[H.he] "
            'did not know how.|Nobody was more surprised than [h.name].} "{Look|Look at me}!" [h.he] {cried|called}. '
            '{[F.name] saw it. "Can you teach me?" [f.he] asked.|[T.name] only nodded, as if it were nothing.|[T.name] '
            "clapped [t.his] hands.} {That evening there was [dish].|Today [h.name] can [art] better than anybody in "
            "[town].|}",
        ),
    },
    {  # a door
        "cast": {"h": "child folk", "f": "child folk"},
        "tell": (
            "[H.name] opened the door and {looked out|stood still}. {It was [hour] o'clock|It was still dark|It was a "
            "cold morning|It was almost night}. {On the step|In front of [h.him]} {lay a letter|stood a [hue] "
            "[thing]|sat a wet [animal]|lay a single glove}. {There was nobody in the street.|Somebody had just been "
            'there, for the grass was pressed down.|"How strange," said [h.name].}',
            (
                2,
                "[H.he] {looked to the left and to the right|called, but nobody answered|waited for a moment}.",
                '{"Did you see anybody?" [h.he] asked a [job] who came by. "Only a [animal2]," said the [job].|"Who '
                'was here?" [h.he] asked the [bird] on the roof. The [bird] {said nothing|flew away}.}',
                "{[H.name] thought about it all day.|At work [h.name] could think of nothing else.|The next day it "
                "happened again.}",
                "On [weekday] there was something at the door again. This time it was {a bag of [fruit]|a note with "
                'one word on it: "Soon"|a [hue2] ribbon}.',
            ),
            "{In the end|A week later|On [weekday2]} [h.name] {got up very early|hid behind the hedge} and waited. "
            "{Somebody came on tiptoe.|Soft steps came up the path.} It was [f.name]. {[F.he] turned red.|[F.he] "
            'jumped.} "{I wanted to thank you, and I did not know how|It is your birthday soon, and it was to be a '
            'surprise|I have wanted to say hello for a year}," said [f.name]. {"Come in," said [h.name]. "{There is '
            '[dish]|The [drink] is hot}."|[H.name] laughed and opened the door wide.}',
        ),
    },
    {  # the old man or woman
        "cast": {"h": "folk", "f": "child"},
        "tell": (
            "{The old [h.man]|An old [h.man]} sat {on a bench|in front of a small house|under a [tree]|on the harbour "
            "wall}. [H.his] name was [h.name], and {in [h.his] youth [h.he] had been a [job]|[h.he] was "
            "{eighty|ninety} years old|nobody knew much about [h.him]}. {Beside [h.him] lay an old [animal].|[H.he] "
            "wore a [hue] [cloth].|On [h.his] knees [h.he] had a [hue] [thing].}",
            (
                '{[Sky].|It was very quiet.} A little [f.boy] stopped. It was [f.name]. "{What are you doing|Why are '
                'you sitting here}?" [f.name] asked.',
                2,
                '"I am {listening|remembering|waiting for the evening|counting}," said the old [h.man].',
                '"When I was as small as you," said the old [h.man], "{there was a [tree] here|we played [game] in '
                'this street|I once [mishap]}."',
                "[F.name] sat down. {For a while they said nothing.|They shared some [fruit].|The [bird]s came "
                "closer.}",
            ),
            "{When it grew dark, [f.name] took [h.his] hand and went with [h.him] as far as the "
            '{gate|corner|bridge}.|"Will you be here tomorrow?" asked [f.name]. "{If I am not, I shall be at home|I am '
            'always here}," said the old [h.man].|Then a bell rang, and [f.name] had to go. The old [h.man] waved.} '
            "{It had been a good day.|And the old [h.man] was not alone any more.|The next day [f.name] came again, "
            "with [dish].}",
        ),
    },
    {  # children find a way to pass the time
        "cast": {"h": "child", "f": "child", "g": "child"},
        "tell": (
            "{The children were bored.|The three children had nothing to do.|It was the first day of the holidays.} "
            "{It was raining.|It was too hot to run.|It was too cold to swim.|They had played [game] [number] times.} "
            '"{What shall we do|What now}?" asked [h.name]. "{We could build something|Let us look for something|I '
            'have an idea}," said [f.name]. {"Oh yes!" said [g.name].|[G.name] was not so sure.}',
            "So they {took|fetched} {an old {table|wagon|bench|ladder}|some rope and a sack|boards and nails|a [hue] "
            "blanket} and {built|made} {a ship|a castle|a house in the [tree]|a shop|a train}. {[H.name] was the "
            "captain.|[F.name] made the rules.|[G.name] painted it [hue2].} {The [animal] was allowed to be {a "
            "dragon|a guest|the cook}.|The [animal] lay down in the middle of it and would not move.}",
            (
                2,
                "They travelled to [town], and from there to the end of the world.",
                '"A storm!" {cried|called} [f.name], and they all {held on|lay down|screamed with joy}.',
                "Then [h.name] and [g.name] quarrelled, because {both wanted to be first|one said yes and the other "
                "said no}. {[F.name] shared some [fruit], and then it was over.|It did not last long.}",
                "They ate [dish] {with their fingers|out of a bucket}, and it tasted better than at home.",
                'A [job] came by and asked for a {ticket|place}. "That makes [number] leaves," said [g.name].',
            ),
            "{When they were called to supper|When the sun went down|When it got cold}, {nobody wanted to go in|they "
            'had been round the world twice|they could not believe how late it was}. "{Tomorrow we will go on|It stays '
            'here}," said [h.name]. {But the next day they had a new idea.|And so it was.|That night all three of them '
            "dreamed of [creature.1].}",
        ),
    },
    {  # friends fall out
        "cast": {"h": "child animal", "f": "child animal"},
        "tell": (
            "[H.name] and [f.name] had been friends for {years|a long time|as long as they could remember}. {They did "
            "everything together.|They {met|played} every day.} But {on [weekday]|one day in [month]} they quarrelled. "
            "It was about {a [thing]|a [hue] [cloth]|the last piece of cake|who was the better singer}, {and it was "
            'really quite unimportant|and it began with one word}. "{I never want to see you again|You are not my '
            'friend any more}," said [h.name]. "{Good|Nor do I want to see you}," said [f.name].',
            (
                2,
                "The next day was {long|empty|grey}. {[H.name] played [game] alone, and lost.|[H.name] talked to the "
                "[animal], but it was not the same.}",
                "[F.name] {made [dish], and it tasted of nothing|looked out of the window and saw nobody|heard a good "
                "joke, and had nobody to tell it to}.",
                "Three times [h.name] went to the door, and three times [h.he] turned back.",
                '"Why do you look so sad?" asked {an old [job]|a neighbour|a [bird]}. "{It is nothing|I have something '
                'in my eye}," said [h.name].',
            ),
            "{In the end|On the third day} they both {set out at the same time|had the same idea}, and {they met on "
            'the bridge|they met half way|their heads bumped together at the corner}. "{I was coming to say that I am '
            'sorry|I am sorry}," said [h.name]. "{So was I|So am I}," said [f.name]. {They began to laugh.|They could '
            "not remember what it had been about.} {Then they went and ate [dish].|And everything was as before, only "
            "a little better.}",
        ),
    },
    {  # something strange in the house
        "cast": {"h": "child", "r": "kin", "f": "child"},
        "tell": (
            "{There was a noise in the attic.|Something lived in the attic.|Every night there was a noise under the "
            'roof.} {It went bump, bump, bump.|It sounded like steps.|It was like a long sigh.} "It is a ghost," said '
            '[f.name]. "{Ghosts do not eat [fruit]|Nonsense}," said [h.name], {for some of the [fruit] were gone|but '
            "[h.his] voice shook}.",
            (
                2,
                "They took {a lamp|a candle|a lantern} and {a broom|a [thing]}, and went up the stairs, one step after "
                "the other.",
                "The door {creaked|was open}. It was {dark|as dark as in a sack}, and it smelled of {dust|old "
                "books|apples}.",
                "Something {moved|shone|breathed}. [F.name] {held [h.his] hand|shut [f.his] eyes}.",
            ),
            "{And there, on an old {chair|trunk|chest},|There, behind an old {cupboard|trunk|mirror},|And there, in a "
            "box,} sat {an owl|a cat with four kittens|a squirrel|a pigeon with a broken wing|a family of mice}. {It "
            'was more frightened than they were.|It looked at them as if to say: who are you?} {"So that is our '
            'ghost," said [h.name].|[F.name] began to laugh.}',
            "{They brought {water|milk} and some bread.|They shut the door softly and went down again.} {In spring the "
            'noise stopped, and they missed it.|From that day on, nobody was afraid of the attic.|"What was it?" asked '
            'everybody at breakfast. "{A guest|A ghost who likes [fruit]}," said [h.name].}',
        ),
    },
    {  # a birthday
        "cast": {"h": "child animal", "f": "child animal", "g": "child animal"},
        "tell": (
            "{It was the birthday of [h.name].|On [weekday] [h.name] had a birthday, but [h.he] told nobody.|[H.name] "
            'woke up and thought, "Today is my birthday."} {The sun was shining.|It was raining.|There was frost on '
            "the window.} [H.name] {put on a [hue] [cloth]|washed [h.his] face twice} and waited. {But nobody "
            "came.|But nobody said anything.|At [hour] o'clock there was still nobody there.}",
            (
                2,
                '"Have they all forgotten me?" thought [h.name].',
                "{[F.name] walked past and only said good morning.|[G.name] ran by with a basket and did not stop.}",
                "So [h.name] went for a walk to [spot]. {Even there it was quiet.|It smelled of [spot.3], but that did "
                "not help.}",
                "[H.name] {tried to read|[chore.1]|ate a piece of bread}, but [h.he] could not stop thinking about it.",
            ),
            "{When [h.name] came home|In the evening|When it grew dark}, {there was a light in the window|the door was "
            'open|there was a strange smell of [dish]}. "Happy birthday!" {called|cried|shouted} [f.name] and [g.name] '
            "and everybody else. On the table stood {a cake with candles|a cake as big as a wheel|a [hue2] box}. "
            '{[F.name] had brought a [thing], and [g.name] a basket of [fruit].|There was [dish] and [drink].} {"We '
            'thought that you would never go out," said [f.name].|"Did you think that we had forgotten?" asked '
            "[g.name].} {They {played [game]|danced|sang} until midnight.|It was the best birthday of all.}",
        ),
    },
    {  # riddles
        "cast": {"h": "child animal", "f": "child folk animal"},
        "tell": (
            '{[H.name] knew a riddle.|"I know a riddle," said [h.name].|It was a long evening, and [h.name] and '
            "[f.name] told each other riddles.} {They were sitting {by the fire|under a [tree]|on the stairs}.|Outside "
            "it was {raining|snowing|dark}.}",
            '"[Riddle]?" asked [h.name].\n{[F.name] thought {for a long time|and scratched [f.his] head}.|[F.name] '
            'looked at the {ceiling|sky|fire}.} "{Is it|Perhaps it is} a [thing]?"\n"No," said [h.name]. "{Try '
            'again|Think again}."\n"{A [animal]|A [creature]|The king}?"\n"No," said [h.name], and laughed.',
            '{Then [f.name] {jumped up|smiled}. "I know! It is [riddle.1]!" "Right," said [h.name].|"I give up," said '
            '[f.name]. "It is [riddle.1]," said [h.name]. "{Of course|How simple}!" cried [f.name].}',
            '{"Now it is my turn," said [f.name]. "[Riddle2]?"\nBut [h.name] {knew it already|knew that one}. '
            '"[Riddle2.1]!" {[h.he] cried|[h.he] said at once}.|"Tell me another one," said [f.name]. But it was late, '
            "and [h.name] was [feeling].|That night [f.name] dreamed of [riddle.1].}",
        ),
    },
    {  # a found purse
        "cast": {"h": "child child folk", "f": "folk"},
        "tell": (
            "{On the way home|On the way to school|At the market|In the park} [h.name] found a [hue] purse. {It lay in "
            "the grass.|It lay under a bench.|It lay in the middle of the road.} There were [number] coins in it{, and "
            "a picture of a [animal]|, and an old ticket|}. {Nobody had seen it.|There was nobody in sight.}",
            (
                2,
                '"I could buy a [hue2] [thing]," thought [h.name], "and [fruit] for everybody."',
                '"But somebody is looking for it," [h.he] thought.',
                '[H.name] asked a [job], but the [job] shook {a|one} finger and said, "Not mine."',
                "[H.he] turned it over and over in [h.his] hand. {It was heavy.|It grew heavier with every step.}",
            ),
            "{At the corner|In front of the bakery|On the bridge} stood [f.name]. {[F.he] was looking at the "
            'ground.|[F.he] was close to tears.} "Have you lost something?" asked [h.name]. "My purse," said [f.name]. '
            '"{It is all I have for this month|I wanted to buy a [cloth] for my mother}. It is [hue]."',
            '{[H.name] held it out.|"Here it is," said [h.name].} [F.name] {counted the coins|could hardly believe '
            'it|laughed for joy}. "{You are honest|Not everybody would do that}," [f.he] said, and gave [h.him] {one '
            "of the coins|a bag of [fruit]|a smile}. {[H.name] went home with empty pockets and a light heart.|It was "
            "the best thing that [h.he] did that [weekday].|And ever since, they say good morning to each other.}",
        ),
    },
    {  # ill in bed
        "cast": {"h": "child", "f": "child", "t": "folk"},
        "tell": (
            "[H.name] was ill. {[H.his] head was hot, and [h.his] feet were cold.|[H.he] had a cough and a red "
            "nose.|[H.he] had to stay in bed for [number] days.} {Outside the sun was shining|Outside the others were "
            'playing [game]|It was [month], and everybody else was outside}. "{How boring|It is not fair}," said '
            "[h.name].",
            (
                2,
                'The doctor came. {[T.name] was a good doctor.|It was [t.name], with a black bag.} "{Open your '
                'mouth|Say ah}," said [t.name]. "{You need sleep|You need [drink] and sleep}."',
                "[H.his] mother brought [dish], but [h.name] {ate only a little|was not hungry}.",
                "The [animal] came and lay {on the blanket|at the foot of the bed}. That was warm.",
                "[H.name] looked at the ceiling. There was a spot that looked like {a [creature]|a map|an old man with "
                "a hat}.",
                "[F.name] stood under the window and {made faces|sang|held up a [thing]}. [H.name] had to laugh, and "
                "then [h.he] had to cough.",
            ),
            "{On [weekday]|One morning|After a long sleep} [h.name] woke up, and {nothing hurt any more|[h.his] head "
            'was cool}. "I am hungry," [h.he] said. {[H.his] mother smiled.|There was [dish2], and [h.he] ate all of '
            "it.} {An hour later [h.he] was outside.|Then [h.he] ran out to look for [f.name].|And who was in bed now? "
            "It was [f.name].}",
        ),
    },
    {  # fishing
        "cast": {"h": "child", "r": "kin", "f": "child folk"},
        "tell": (
            "{[H.name] and [f.name] went fishing.|On [weekday] [h.name] went fishing with [f.name].|Early in the "
            "morning [h.name] and [f.name] walked to the {lake|river}.} {They had a rod, a bucket and some "
            'bread.|There was mist over the water.|"Be quiet," said [f.name], "or the fish will hear us."}',
            (
                3,
                "They waited for {one hour|two hours|the whole morning}. {Nothing happened.|A [bird] looked on.|The "
                "water was as smooth as glass.}",
                '"I have something!" cried [h.name], and pulled. It was {an old boot|a [hue] hat|a kettle|a branch}.',
                '"Do fish sleep?" asked [h.name]. "{Only when we are here|Ask them}," said [f.name].',
                "They ate their bread{, and the ducks got the crumbs|}. The sun grew warm.",
                "[H.name] {fell asleep|counted the clouds|put [h.his] feet into the water}.",
            ),
            "{In the end|In the evening|Just before sunset} {they caught a fish no longer than a finger, and let it "
            "go|they had caught [number] fish, and there was enough for everybody|they had caught nothing but a cold}. "
            '{"It was a good day all the same," said [f.name].|They bought [dish] on the way home.|"Tomorrow we will '
            'come again," said [f.name].}',
        ),
    },
    {  # a feast
        "cast": {"h": "folk child", "f": "folk", "g": "child"},
        "tell": (
            "{Once a year there was a feast in [town].|In [month] the village had its feast.|It was the day of the "
            "great feast.} {Flags hung from the windows, [hue], [hue2] and [hue3].|There were lanterns in the "
            "trees.|The band played {too fast|too loudly|since the morning}.} {Everybody was there.|Nobody stayed at "
            "home, not even the [animal].}",
            (
                3,
                '[H.name] had made [dish]. {It was gone in no time.|"May I have some more?" asked everybody.}',
                "[F.name] danced with {the mayor|a [job]|everybody}, and lost {a shoe|a button|[f.his] hat}.",
                "[G.name] won a [hue] [thing] and {carried it about all day|gave it away again}.",
                "There was a race between {a goose and a pig|the baker and the mayor|two old donkeys}. {Nobody "
                "won.|The goose was in no hurry.|Everybody laughed.}",
                "{At noon|In the middle of it all} it began to rain. They {carried the tables into the barn|danced in "
                "the rain|sat under the tables and sang}.",
                "A [job] {made a speech|sang a song with [number] verses}. {It was too long, but it was kind.|[G.name] "
                "fell asleep.}",
            ),
            "{When the moon came up|At midnight|When the last lantern went out}, {the old people told stories|the "
            'children were asleep on the benches|somebody was still singing}. "{Next year again|It was the best feast '
            'of all}," said [h.name]. {"You say that every year," said [f.name].|[F.name] said nothing, and looked at '
            "the stars.|And so it was.}",
        ),
    },
    {  # an old letter
        "cast": {"h": "folk child", "f": "folk", "r": "kin"},
        "tell": (
            "{One [weekday]|In [month]|On a grey morning} a letter came for [h.name]. {It was very old.|The paper was "
            'yellow.|It had been on its way for [number] years.} "{It was behind a cupboard in the post office|It had '
            'fallen behind a shelf|It went to [town] by mistake}," said the mail carrier, and was {sorry|very red in '
            "the face}.",
            '{[H.name] opened it with a knife.|[H.name] sat down and opened it.} "Dear [h.name]," it said, "{I am '
            "sorry for what I said|I have found your [thing]|I have always liked you}. {Come to [spot] on [weekday2]|I "
            'will wait for you at [spot]}. Your [f.name]." {[H.name] read it twice.|[H.name] read it aloud to the '
            "[animal].|For a while [h.name] did not move.}",
            '"It is {too late|a little late} now," said [h.name]. But on [weekday2] [h.he] {put on a [hue] '
            "[cloth]|combed [h.his] hair} and went. {[Spot.1], [spot.2]: everything was as it used to be.|It still "
            "smelled of [spot.3].}",
            '{And there, on a bench, sat [f.name]. "You are late," [f.he] said, and smiled.|Nobody was there. But the '
            'next day [h.name] wrote an answer, and a week later [f.name] stood at the door.|[F.name] was there. "I '
            'came every [weekday2]," [f.he] said.} {They had a great deal to talk about.|They ate [dish] and talked '
            "until it was dark.|}",
        ),
    },
    {  # in the wood
        "cast": {"h": "child folk", "f": "child folk"},
        "tell": (
            "{[H.name] and [f.name] went into the wood to look for {mushrooms|berries|nuts|firewood}.|In [month] "
            '[h.name] and [f.name] walked through the wood.|"Let us go into the wood," said [f.name].} {The leaves '
            "were {wet|yellow|new and green}.|It smelled of {moss|rain|wood smoke}.|The light came down between the "
            "trees.}",
            (
                3,
                "They {saw|found} {a [hue] feather|the nest of a [bird]|the tracks of a deer|a stone that looked like "
                "a face}.",
                '"Listen," said [h.name]. Somewhere a {woodpecker|cuckoo|[bird]} could be heard. Then it was quiet '
                "again.",
                "{A deer|A hare|A fox|A squirrel} stood between the trees and looked at them. {Nobody moved.|Then it "
                "was gone, like a thought.}",
                "[F.name] {stepped into a hole|lost a shoe in the mud|got a branch in the face}, and they laughed so "
                "much that all the birds flew up.",
                "They rested on a fallen [tree] and ate [fruit].",
                '"Which way is home?" asked [f.name]. "{That way|I thought you knew}," said [h.name].',
            ),
            "{At sunset they came out of the wood|When it grew dark, they found the path|In the end they followed the "
            "stream}, {with a full basket|with an empty basket and wet feet|tired and hungry}. {There was [dish] at "
            'home.|"It is always further back than out," said [h.name].|"Did you hear it, too?" asked [f.name]. '
            '"What?" "How quiet it was."}',
        ),
    },
    {  # the first day of work
        "cast": {"h": "child", "t": "folk"},
        "tell": (
            "{[H.name] wanted to become a [job].|It was the first day of work for [h.name].|[H.name] was to learn how "
            "to be a [job].} {So [h.his] mother sent [h.him] to [t.name], the best [job] in [town].|[T.name], an old "
            "[job], took [h.him] in.} [T.name] worked [job.1] and {did not talk much|talked all day long|was strict, "
            "but fair}.",
            (
                3,
                '"First you must {sweep the floor|fetch the water|light the stove|clean the windows}," said [t.name]. '
                "{[H.name] did it without a word.|That was not what [h.name] had thought.}",
                '[H.name] was not allowed to touch the tools. "Not yet," said [t.name].',
                'On the second day [h.he] made a mistake. {[T.name] only sighed.|"{Nobody learns without '
                'mistakes|Begin again}," said [t.name].}',
                "{Week after week went by.|The winter passed.|A year went by.} [H.name] {watched|learned} and asked a "
                "hundred questions.",
                "At noon they ate [dish] together, and [t.name] told how [t.he] once [job.4].",
            ),
            "{Then, one [weekday], [t.name] was ill|One morning [t.name] did not come|Then there was so much to do "
            'that [t.name] needed help}. "{You must do it alone|Now show me what you can do}," [t.he] said. {[H.his] '
            'hands trembled, but not for long.|[H.name] worked until midnight.} "{That is good work|I could not have '
            'done it better}," said [t.name] {the next day|at last}. {And [h.name] was a [job].|[H.name] has never '
            "forgotten it.}",
        ),
    },
)
